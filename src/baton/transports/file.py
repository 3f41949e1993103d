"""`file://`: engines that share a directory, and no memory and no fast network.

Options: `path` (the directory, default ~/.cache/baton/kv), `max_bytes` (of all its entries, default 8 GiB),
`host` (numeric address of this machine on which peers reach the lifeline; default 127.0.0.1).

The bytes go through a `FileStore`; who has to do what goes over the lifeline. A write: this side puts the
batch into the store under its digest and tells the peer that key and where the bytes belong; the peer gets
the entry, which checks it, copies it into its regions, and answers; only then is the write done. A read: the
peer puts what it is asked for and answers with the key; this side gets it. So each process alone writes to
its memory, within its own regions, and a batch that was sent before is not written again. Entries stay until
the store needs their room.

Fence: as only this process writes here, a peer that is gone is fenced, once what it asked for has been
carried out. That a peer is gone is known from its orderly close, and on one host from its process's death.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError, wait
from typing import Any

import msgspec
import numpy as np

from baton.errors import BatonError, ConfigError, ProtocolError, TransportError
from baton.transports.base import ByteArray, CopyList, Direction
from baton.transports.batches import BATCH_BYTES, Rows
from baton.transports.library import BatchFailedError, Library, RemotePeer
from baton.transports.lifeline import Lifeline, Line
from baton.transports.mover import copy_runs
from baton.transports.remote import RemoteTransport
from baton.transports.store import FileStore, StoreOptions

_LOOK_S = 0.1  # how often one who waits for an answer looks whether the peer is still there
_MAX_PEERS = 64  # batches at a time, one for each peer: one that does not answer must not hold up the others
_TENSOR = "bytes"


class FileOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the URI."""

    host: str = "127.0.0.1"


class _Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True, forbid_unknown_fields=True):
    """Fetch entry `key` into these addresses (write), or put the bytes there into the store (read)."""

    number: int
    direction: Direction
    key: str
    runs: bytes  # int64 [2, runs]: addresses at the peer, bytes


class _Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True, forbid_unknown_fields=True):
    number: int
    key: str
    error: str


class FileLibrary(Library):
    """Copies through a store."""

    scheme = "file"

    def __init__(self, options: FileOptions) -> None:
        self._store = FileStore(options.path, options.max_bytes)
        # Two pools: those who ask wait for a peer, whose own may be waiting for those who serve.
        self._askers = ThreadPoolExecutor(_MAX_PEERS, thread_name_prefix="baton-file-ask")
        self._servers = ThreadPoolExecutor(4, thread_name_prefix="baton-file-serve")
        self._serving: set[Future[None]] = set()
        self._waiting: dict[int, tuple[Line, Future[str]]] = {}
        self._answers = threading.Lock()
        self._next = 0
        self._regions: list[ByteArray] = []
        self._lifeline: Lifeline
        self._bounce: ByteArray

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        """See `Library`."""
        self._lifeline, self._bounce = lifeline, bounce

    def stop(self) -> None:
        """See `Library`."""
        self._askers.shutdown()
        self._servers.shutdown()

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        """See `Library`."""
        self._regions = regions
        return self._lifeline.contact.secret.hex(), b""

    def add(self, endpoint: str, metadata: bytes) -> None:
        """See `Library`."""

    def remove(self, endpoint: str) -> bool:
        """See `Library`."""
        # A worker may be at the memory of a batch; a peer that lives may be carrying one out.
        return False

    def issue(self, peer: RemotePeer, direction: Direction, rows: Rows) -> Any:
        """See `Library`."""
        near, far = rows[:, [0, 2]].T, rows[:, [1, 2]].T
        line, spans = peer.line, [*self._regions, self._bounce]

        def write() -> None:
            key = self._store.put({_TENSOR: _gather(spans, near)})
            self._ask(line, direction, key, far)

        def read() -> None:
            key = self._ask(line, direction, "", far)
            self._fetch(spans, key, near, line)

        work = self._askers.submit(write if direction == "write" else read)
        work.add_done_callback(lambda _: self._lifeline.wake())
        return work

    def ended(self, handle: Future[None]) -> bool:
        """See `Library`."""
        return handle.done()

    def check(self, handle: Future[None]) -> bool:
        """See `Library`."""
        if not handle.done():
            return False
        try:
            handle.result()
        except BatonError as error:
            raise BatchFailedError(str(error)) from error
        return True

    def take_in(self) -> None:
        """See `Library`."""
        # The driver has taken in all frames; what they asked for is being done.
        wait(list(self._serving))

    # ------------------------------------------------------------ this side asks

    def _ask(self, line: Line, direction: Direction, key: str, runs: Rows) -> str:
        """Have the peer do its part of a batch; the key it answers with."""
        answer: Future[str] = Future()
        with self._answers:
            self._next += 1
            number = self._next
            self._waiting[number] = (line, answer)
        line.send(msgspec.msgpack.encode(_Ask(number, direction, key, np.ascontiguousarray(runs).tobytes())))
        try:
            while True:
                try:
                    return answer.result(_LOOK_S)
                except TimeoutError:
                    if not line.open():
                        raise TransportError("the peer is gone") from None
        finally:
            self._waiting.pop(number, None)

    def _fetch(self, spans: list[ByteArray], key: str, runs: Rows, line: Line) -> None:
        entry = self._store.get(key)
        if entry is None:
            raise TransportError(f"the store has no entry {key}; do both engines use one directory?")
        data = entry.tensors.get(_TENSOR)
        if data is None or data.size != int(runs[1].sum()):
            raise TransportError(f"entry {key} of the store holds something else")
        if not line.open():
            raise TransportError("who asked for this copy is gone, or has given it up")
        _scatter(spans, runs, data)

    # ------------------------------------------------------------ a peer asks

    def on_frame(self, line: Line, frame: bytes) -> None:
        """See `Library`."""
        try:
            message = msgspec.msgpack.decode(frame, type=_Ask | _Answer)
            if isinstance(message, _Ask):
                serving = self._servers.submit(self._serve, line, message)
                self._serving = {each for each in self._serving if not each.done()} | {serving}
            else:
                self._answered(line, message)
        except (msgspec.MsgspecError, ValueError):
            line.abort()

    def _answered(self, line: Line, message: _Answer) -> None:
        asked, answer = self._waiting.get(message.number, (None, None))
        if asked is not line or answer is None or answer.done():
            return
        if message.error:
            answer.set_exception(TransportError(message.error))
        else:
            answer.set_result(message.key)

    def _serve(self, line: Line, ask: _Ask) -> None:
        key, error = ask.key, ""
        try:
            if len(ask.runs) % 16:
                raise ProtocolError("runs are pairs of int64")
            runs = np.frombuffer(ask.runs, dtype=np.int64).reshape(2, -1)
            if ask.direction == "write":
                self._fetch(self._regions, ask.key, runs, line)
            else:
                key = self._store.put({_TENSOR: _gather(self._regions, runs)})
        except Exception as refusal:  # who asks waits for an answer, whatever happens here
            error = str(refusal)[:1000] or type(refusal).__name__
        line.send(msgspec.msgpack.encode(_Answer(ask.number, key, error)))


def _gather(spans: list[ByteArray], runs: Rows) -> ByteArray:
    """The bytes of runs (`[2, runs]`: addresses, bytes), back to back. Raises `ProtocolError` unless all lie in
    one of `spans`.
    """
    span, offset, nbytes = _locate(spans, runs)
    data = np.empty(int(nbytes.sum()), dtype=np.uint8)
    copies = CopyList(0, 0, offset, np.cumsum(nbytes) - nbytes, nbytes)
    copy_runs(span, data, copies, np.zeros(2, dtype=np.int64))
    return data


def _scatter(spans: list[ByteArray], runs: Rows, data: ByteArray) -> None:
    """The reverse of `_gather`; `data` has as many bytes as the runs."""
    span, offset, nbytes = _locate(spans, runs)
    copies = CopyList(0, 0, np.cumsum(nbytes) - nbytes, offset, nbytes)
    copy_runs(data, span, copies, np.zeros(2, dtype=np.int64))


def _locate(spans: list[ByteArray], runs: Rows) -> tuple[ByteArray, Rows, Rows]:
    address, nbytes = (np.ascontiguousarray(column) for column in runs)
    if not bool(((nbytes >= 0) & (nbytes <= BATCH_BYTES)).all()) or int(nbytes.sum()) > BATCH_BYTES:
        raise ProtocolError(f"the runs of a batch hold more than {BATCH_BYTES} bytes")
    for span in spans:
        offset = address - span.ctypes.data
        if bool(((offset >= 0) & (nbytes <= span.size) & (offset <= span.size - nbytes)).all()):
            return span, offset, nbytes
    raise ProtocolError("a run lies outside the registered regions")


def create(query: dict[str, str]) -> RemoteTransport:
    """The factory of `file://`. Raises `ConfigError` for an option that does not exist or is out of range."""
    try:
        options = msgspec.convert(query, FileOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError("transport", f"file: {error}") from error
    return RemoteTransport(FileLibrary(options), options.host)
