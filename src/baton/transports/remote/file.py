"""`file://`: engines that share a directory, and neither memory nor a fast network: docs/transports.md says how bytes
move.

A read that waits for its answer ends when its peer is given up, since only the answer would make this process copy.

Fence: the peer is gone, and the workers have served its requests.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from baton.errors import BatonError, ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.kvstore.store import FileStore, StoreOptions
from baton.kvstore.threads import started_executor
from baton.transports.base import ByteArray, Direction
from baton.transports.batches import BATCH_BYTES, Runs
from baton.transports.copying import copy_runs
from baton.transports.remote.library import BatchFailedError, Library, RemotePeer
from baton.transports.remote.lifeline import Lifeline, Line
from baton.transports.remote.remote_transport import RemoteTransport, check_host

_WORKERS = 16  # a shared file system is slow, but serves several requests at a time
_TENSOR = "bytes"


class _Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True, forbid_unknown_fields=True):
    """Fetch entry `key` into these addresses (write), or put their bytes into the store (read)."""

    number: int
    direction: Direction
    key: str
    runs: bytes  # int64 [2, runs]: addresses at the peer, bytes


class _Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True, forbid_unknown_fields=True):
    """The peer has finished batch `number`: the entry's key, or the error."""

    number: int
    key: str
    error: str


@dataclass(eq=False)
class Batch:
    """A batch requested by this side. `work`: the file access in this process. `near` and `far`: int64 `[2, runs]`,
    addresses here and there, bytes."""

    number: int
    peer: RemotePeer
    direction: Direction
    near: Runs
    far: Runs
    work: Future[None] | None = None
    answer: _Answer | None = None


class FileOptions(StoreOptions, frozen=True, kw_only=True):
    """`path`, `max_bytes`: of the store. `host`: the lifeline's address."""

    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_host(self.host)


class FileLibrary(Library):
    """`RemoteTransport` over a `FileStore`. File access runs on the library's own threads."""

    scheme = "file"

    def __init__(self, options: FileOptions) -> None:
        self._store = FileStore(options.path, options.max_bytes)
        self._workers = started_executor(_WORKERS, "baton-file")
        self._serving: set[Future[None]] = set()
        self._asked: WeakValueDictionary[int, Batch] = WeakValueDictionary()  # the driver keeps them alive
        self._next = 0
        self._regions: list[ByteArray] = []
        self._lifeline: Lifeline
        self._bounce: ByteArray

    def start(self, lifeline: Lifeline, bounce: ByteArray) -> None:
        self._lifeline, self._bounce = lifeline, bounce

    def stop(self) -> None:
        self._workers.shutdown()

    def register(self, regions: list[ByteArray]) -> tuple[str, bytes]:
        self._regions = regions
        return self._lifeline.contact.secret.hex(), b""

    def add(self, endpoint: str, metadata: bytes) -> None:
        """Nothing to do: batches use the peer's line."""

    def remove(self, endpoint: str) -> bool:
        """Nothing can be cut: a worker here or a living peer may still process a batch."""
        return False

    def receive_rest(self) -> None:
        # The peer's frames have all been passed to `on_frame`.
        wait(list(self._serving))

    def issue(self, peer: RemotePeer, direction: Direction, rows: Runs) -> Batch:
        self._next += 1
        batch = Batch(self._next, peer, direction, rows[:, [0, 2]].T, rows[:, [1, 2]].T)
        self._asked[batch.number] = batch
        if direction == "write":
            batch.work = self._work(
                lambda: self._ask(batch, self._store.put({_TENSOR: _gather(self._local_arrays(), batch.near)}))
            )
        else:
            self._ask(batch, "")
        return batch

    def ended(self, handle: Batch) -> bool:
        return handle.work is None or handle.work.done()

    def check(self, handle: Batch) -> bool:
        """A read also fails once its peer is given up."""
        if not self.ended(handle):
            return False
        try:
            if handle.work is not None:
                handle.work.result()
            if handle.answer is None:
                _need_answer(handle)
                return False
            if handle.answer.error:
                raise TransportError(handle.answer.error)
        except BatonError as error:
            raise BatchFailedError(str(error)) from error
        return True

    def _work(self, work: Callable[[], None]) -> Future[None]:
        future = self._workers.submit(work)
        future.add_done_callback(lambda _: self._lifeline.wake())
        return future

    def _local_arrays(self) -> list[ByteArray]:
        return [*self._regions, self._bounce]

    def _ask(self, batch: Batch, key: str) -> None:
        ask = _Ask(batch.number, batch.direction, key, np.ascontiguousarray(batch.far).tobytes())
        batch.peer.line.send(msgspec.msgpack.encode(ask))

    def _answered(self, line: Line, answer: _Answer) -> None:
        batch = self._asked.get(answer.number)
        if batch is None or batch.peer.line is not line or batch.answer is not None:
            return
        if batch.direction == "read" and batch.peer.broken is not None:
            return  # its memory may be reused
        batch.answer = answer
        if batch.direction == "read" and not answer.error:
            batch.work = self._work(lambda: self._fetch(self._local_arrays(), answer.key, batch.near, line))

    def _fetch(self, spans: list[ByteArray], key: str, runs: Runs, line: Line) -> None:
        entry = self._store.get(key)
        if entry is None:
            raise TransportError(f"the store has no entry {key}; do both engines use one directory?")
        data = entry.tensors.get(_TENSOR)
        if data is None or data.size != int(runs[1].sum()):
            raise TransportError(f"entry {key} of the store holds something else")
        if not line.open():
            raise TransportError("the peer that asked for this copy is gone, or has given it up")
        _scatter(spans, runs, data)

    def on_frame(self, line: Line, frame: bytes) -> None:
        try:
            message = msgspec.msgpack.decode(frame, type=_Ask | _Answer)
        except (msgspec.MsgspecError, ValueError):
            line.abort()
            return
        if isinstance(message, _Answer):
            self._answered(line, message)
        else:
            serving = self._workers.submit(self._answer_peer, line, message)
            self._serving = {each for each in self._serving if not each.done()} | {serving}

    def _answer_peer(self, line: Line, ask: _Ask) -> None:
        key, error = ask.key, ""
        try:
            if len(ask.runs) % 16:
                raise ProtocolError("runs are pairs of int64")
            runs = np.frombuffer(ask.runs, dtype=np.int64).reshape(2, -1)
            if ask.direction == "write":
                self._fetch(self._regions, ask.key, runs, line)
            else:
                key = self._store.put({_TENSOR: _gather(self._regions, runs)})
        except Exception as refusal:  # otherwise the peer's batch would wait for the end of the line
            error = str(refusal)[:1000] or type(refusal).__name__
        line.send(msgspec.msgpack.encode(_Answer(ask.number, key, error)))


def _need_answer(batch: Batch) -> None:
    """Raises `TransportError`."""
    if not batch.peer.line.open():
        raise TransportError("the peer is gone")
    # The peer may still carry out a write.
    if batch.direction == "read" and batch.peer.broken is not None:
        raise TransportError(batch.peer.broken)


def _gather(spans: list[ByteArray], runs: Runs) -> ByteArray:
    """The bytes of runs, concatenated. Raises `ProtocolError` for a run outside of `spans`."""
    span, offset, nbytes = _locate(spans, runs)
    data = np.empty(int(nbytes.sum()), dtype=np.uint8)
    copies = CopyList(0, 0, offset, np.cumsum(nbytes) - nbytes, nbytes)
    copy_runs(span, data, copies, np.zeros(2, dtype=np.int64))
    return data


def _scatter(spans: list[ByteArray], runs: Runs, data: ByteArray) -> None:
    span, offset, nbytes = _locate(spans, runs)
    copies = CopyList(0, 0, np.cumsum(nbytes) - nbytes, offset, nbytes)
    copy_runs(data, span, copies, np.zeros(2, dtype=np.int64))


def _locate(spans: list[ByteArray], runs: Runs) -> tuple[ByteArray, Runs, Runs]:
    address, nbytes = (np.ascontiguousarray(column) for column in runs)
    if not bool(((nbytes >= 0) & (nbytes <= BATCH_BYTES)).all()) or int(nbytes.sum()) > BATCH_BYTES:
        raise ProtocolError(f"the runs of a batch hold more than {BATCH_BYTES} bytes")
    for span in spans:
        offset = address - span.ctypes.data
        if bool(((offset >= 0) & (nbytes <= span.size) & (offset <= span.size - nbytes)).all()):
            return span, offset, nbytes
    raise ProtocolError("a run lies outside the registered regions")


def create(options: FileOptions) -> RemoteTransport:
    return RemoteTransport(FileLibrary(options), options.host)
