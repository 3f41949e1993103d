"""Modelled one-sided copies, which the other end cannot refuse while a connection lasts.

Two fabrics. `shm`: the issuing process moves the bytes, so its pause stops them and its death ends them; death is seen
at once, and is the fence. `rdma`: the adapter moves them, also for a paused process, and copies in flight land even
after death; a dead peer is noticed late, and the fence is the closed connection, after which the adapter refuses the
peer's operations.
"""

from __future__ import annotations

import errno
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.errors import ProtocolError, TransportError
from baton.kv.geometry import CopyList
from baton.transports.base import ByteArray, Direction, Operation, Peer, Region, check_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.rank import Rank
    from simulation.world import World

from simulation.modelled.memory import CELL_BYTES

# Seconds until a connection to a dead process is found broken.
_NOTICED = (0.3, 8.0)
# Seconds until a call completes, normally and with a fault.
_CALL = (0.0, 0.004)
_SLOW_CALL = (0.1, 4.0)
_CONNECT_TIMEOUT_S = 5.0
_LOOK_S = 0.05


@dataclass(eq=False, slots=True)
class Connection:
    """A fabric connection of two processes, usable once both have joined it. A closed end lets no operation of the peer
    touch its side.
    """

    ends: tuple[Rank, Rank]
    joined: set[Rank] = field(default_factory=set)
    closed: set[Rank] = field(default_factory=set)

    @property
    def usable(self) -> bool:
        return len(self.joined) == 2 and not self.closed


class Fabric:
    def __init__(self, world: World) -> None:
        self.world = world
        self._connections: dict[frozenset[str], Connection] = {}

    def connect(self, one: Rank, other: Rank) -> Connection:
        """`one` joins its connection with `other`; a new one if the last is broken at either end."""
        key = frozenset((one.uid, other.uid))
        found = self._connections.get(key)
        if found is None or found.closed:
            found = self._connections[key] = Connection((one, other))
        found.joined.add(one)
        return found

    def died(self, process: Rank) -> None:
        """Its peers notice after a random time."""
        for connection in list(self._connections.values()):
            for end in connection.ends:
                if process in connection.ends and end is not process:
                    self.world.after(self.world.random.uniform(*_NOTICED), self.close, connection, end)

    def close(self, connection: Connection, end: Rank) -> None:
        """One end finds the connection broken."""
        if end not in connection.closed:
            connection.closed.add(end)
            self.world.note(end.name, "a fabric connection is closed")
            end.wake()

    def break_one(self) -> bool:
        """A fault: both ends of one open connection find it broken, one after the other."""
        world = self.world
        usable = [c for c in self._connections.values() if c.usable and not any(end.dead for end in c.ends)]
        if world.settings.fabric != "rdma" or not usable:
            return False
        connection = world.random.choice(usable)
        for end in connection.ends:
            world.after(world.random.choice((0.0, world.random.uniform(0.0, 3.0))), self.close, connection, end)
        return True


class SimPeer:
    def __init__(self, own: Rank, far: Rank, connection: Connection) -> None:
        self.own, self.far, self.connection = own, far, connection
        self.connected = True
        self._shm = own.world.settings.fabric == "shm"

    @property
    def region_sizes(self) -> Sequence[int]:
        return self.far.region_sizes

    def alive(self) -> bool:
        if not self.connected:
            return False
        return not self.far.gone if self._shm else self.own not in self.connection.closed

    def fenced(self) -> bool:
        return self.far.dead if self._shm else self.own in self.connection.closed

    def dead(self) -> bool:
        return self._shm and self.far.dead


# Source region and cell, destination region and cell, number of cells. A negative region: the copy fails here.
Run = tuple[int, int, int, int, int]


class SimOperation(Operation):
    """One copy list in progress, run by run."""

    __slots__ = ("attempt", "corrupt", "direction", "label", "late", "peer", "runs", "stalled", "window")

    def __init__(self, tag: str, peer: SimPeer, direction: Direction, runs: list[Run]) -> None:
        super().__init__(tag)
        self.label = tag.split(" ")[0]
        self.attempt = tag[: tag.index(")") + 1] if tag.startswith(f"{self.label} (ranks") else self.label
        self.peer, self.direction, self.runs = peer, direction, runs
        self.late = self.corrupt = self.stalled = False
        self.window = 0.0

    @property
    def harmless(self) -> bool:
        """It may never end, but no longer touches a living process's memory."""
        if self.peer.own.world.settings.fabric == "rdma" and self.peer.connection.closed:
            return True
        return self.direction == "write" and self.peer.far.dead


class SimTransport:
    scheme = "sim"

    def __init__(self, process: Rank, fabric: Fabric) -> None:
        self.process, self.fabric, self.world = process, fabric, process.world
        self.pending: list[SimOperation] = []
        self._closed = False

    # ------------------------------------------------------------ the Transport protocol

    def allocate(self, name: str, nbytes: int) -> ByteArray:
        """Not modelled: memory is cells."""
        raise TransportError(f"no bytes to allocate for {name!r}: modelled memory is cells")

    def register(self, regions: Sequence[Region]) -> bytes:
        """The descriptor names the process."""
        return self.process.uid.encode()

    def connect(self, descriptor: bytes) -> Future[Peer]:
        """Over `rdma` the peer must answer; a paused peer answers after it resumes. Raises `OSError` if a file of its
        memory cannot be opened, at once or in the background.
        """
        if self.world.short():
            error = OSError(errno.EMFILE, "Too many open files")
            if self.world.settings.fabric == "shm":
                raise error
            failed: Future[Peer] = Future()
            self.world.after(self.world.random.uniform(*_CALL), failed.set_exception, error)
            return failed
        future: Future[Peer] = Future()
        far = self.world_process(descriptor.decode())
        slow = self.world.hit("slow_call")
        delay = self.world.random.uniform(*(_SLOW_CALL if slow else _CALL))
        self.world.after(delay, self._reach, future, far, self.world.now + _CONNECT_TIMEOUT_S)
        return future

    def _reach(self, future: Future[Peer], far: Rank, until: float) -> None:
        process = self.process
        if process.dead:
            return
        hangs = far.paused and self.world.settings.fabric == "rdma"
        if process.paused or (hangs and not far.gone and self.world.now < until):
            self.world.after(_LOOK_S, self._reach, future, far, until)
        elif far.gone or hangs or self._closed:
            future.set_exception(TransportError(f"engine {far.uid} does not answer"))
        else:
            future.set_result(SimPeer(process, far, self.fabric.connect(process, far)))

    def world_process(self, uid: str) -> Rank:
        """A process, dead or alive, by its incarnation."""
        found = self.process.cluster.ranks.get(uid)
        if found is None:
            raise ProtocolError("not a descriptor of a modelled transport")
        return found

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        assert isinstance(peer, SimPeer)
        if self._closed or not peer.alive():
            raise TransportError(f"peer {peer.far.uid} is gone")
        own, far = self.process.region_sizes, peer.region_sizes
        check_copies(copies, *((own, far) if direction == "write" else (far, own)))
        random = self.world.random
        runs = [
            (copies.source_region, source // CELL_BYTES, copies.dest_region, dest // CELL_BYTES, nbytes // CELL_BYTES)
            for source, dest, nbytes in zip(
                copies.source_offset.tolist(), copies.dest_offset.tolist(), copies.nbytes.tolist(), strict=True
            )
        ]
        if len(runs) == 1 and runs[0][4] > 1:
            region, source, to, dest, count = runs[0]
            cut = random.randrange(1, count)
            runs = [(region, source, to, dest, cut), (region, source + cut, to, dest + cut, count - cut)]
        random.shuffle(runs)
        operation = SimOperation(tag, peer, direction, runs)
        operation.late, operation.corrupt = self.world.hit("late_copy"), self.world.hit("corrupt")
        slow = self.process.slow or self.world.hit("slow_copy")
        operation.window = random.uniform(0.2, 4.0) if slow else random.uniform(0.0002, 0.01)
        if self.world.hit("failed_copy"):
            # It ends in an error after some of its runs.
            del operation.runs[: random.randint(1, len(runs))]
            operation.runs.insert(0, (-1, 0, 0, 0, 0))
        self.pending.append(operation)
        self.world.after(operation.window / len(runs), self._advance, operation)
        return operation

    def cancel(self, operation: Operation) -> None:
        assert isinstance(operation, SimOperation)
        if operation.poll() == "pending" and operation.late:
            # It goes on for some time.
            operation.window = max(operation.window, self.world.random.uniform(0.1, 6.0))
        elif self.world.random.random() < 0.5:
            self._end(operation, "cancelled")
        else:
            self.world.after(self.world.random.uniform(*_CALL), self._end, operation, "cancelled")

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, SimPeer)
        peer.connected = False
        for operation in [operation for operation in self.pending if operation.peer is peer]:
            self.world.after(self.world.random.uniform(*_CALL), self._end, operation, "disconnected")

    def close(self) -> None:
        self._closed = True
        for operation in list(self.pending):
            self._end(operation, "closed")

    # ------------------------------------------------------------ moving bytes

    def resume(self) -> None:
        """The process runs again, and so do the copies of its own threads."""
        for operation in self.pending:
            if operation.stalled:
                operation.stalled = False
                self.world.after(self.world.random.uniform(0.0, 0.05), self._advance, operation)

    def _end(self, operation: SimOperation, error: str | None = None) -> None:
        if operation in self.pending:
            self.pending.remove(operation)
        operation.end(error)
        self.process.wake()

    def _advance(self, operation: SimOperation) -> None:
        """Move one run, and schedule the next."""
        process, peer = self.process, operation.peer
        if operation.poll() != "pending":
            return
        if self.world.settings.fabric == "shm":
            if process.dead:
                return
            if process.paused:
                operation.stalled = True
                return
        elif not peer.connection.usable:
            self._end(operation, "the connection is broken")
            return
        elif peer.far.dead:
            # No answer; the adapter gives up when the connection is found broken.
            self.world.after(0.5, self._advance, operation)
            return
        run = operation.runs.pop()
        if run[0] < 0:
            self._end(operation, "the copy failed")
            return
        self._move(operation, run)
        if not operation.runs:
            self._end(operation)
            return
        self.world.after(operation.window / len(operation.runs), self._advance, operation)

    def _move(self, operation: SimOperation, run: Run) -> None:
        region, source, to, dest, count = run
        own, far = self.process, operation.peer.far
        reader, writer = (own, far) if operation.direction == "write" else (far, own)
        values = reader.memories[region].cells[source : source + count]
        if not operation.harmless:
            reader.may_read(region, source, count, operation.label)
            writer.may_write(to, dest, count, operation.label)
        if operation.corrupt:
            operation.corrupt = False
            index = self.world.random.randrange(count)
            values[index] ^= 1 << int(self.world.random.randrange(60))
            self.world.note(own.name, f"a bit flips in a copy of {operation.tag}")
        writer.memories[to].cells[dest : dest + count] = values
        if self.world.tracing:
            pages = sorted(writer.memories[to].pages_of(dest, count))
            self.world.note(own.name, f"{operation.direction}s {operation.tag} into pages {pages} of {writer.name}")


__all__ = ["Connection", "Fabric", "SimOperation", "SimPeer", "SimTransport"]
