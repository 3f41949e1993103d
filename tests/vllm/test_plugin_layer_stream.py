"""Layer streaming from vLLM: P's half of the plug-in, its state machine and the planner, over memory whose entries
depend on their layer and tokens. Copies run at once, or when the test says so; without vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from baton.errors import ConfigError
from baton.handoff.agent.leg_events import GiveUp, LegEvent, PrefillLeg
from baton.handoff.plan.planner import plan_copies
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptKey, Commit, Register
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.protocol.ticket import SignedTicket
from baton.testing import RecordingAgent
from baton.vllm import layer_stream, support
from baton.vllm.config import read_config
from baton.vllm.steps import ClosePrefill, ComputedTokens, OpenPrefill, StepNews
from baton.vllm.worker import WorkerSide
from baton.wire import KVStream
from testkit.handoffs.tickets import make_ticket
from tests.vllm.test_plugin_bug_classes import DRAFTER, GARBAGE, LOOKAHEAD, Engine, _bytes, _wrong, entry_of, layer_name

TARGET_LAYERS = range(4)


@pytest.fixture(autouse=True)
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report every layer, however few bytes it has."""
    monkeypatch.setattr(layer_stream, "MIN_BYTES", 1)


class Agent(RecordingAgent):
    """P's agent: the state machine, and copies that run when it starts them, or, with `late`, in `run`."""

    def __init__(self, p: Engine, d: Engine) -> None:
        super().__init__(self._handle)
        self.p, self.d = p, d
        self.late, self.commit, self.aborted = False, False, False
        self.copied: list[tuple[str, int]] = []  # group and layer of each run of a copy, in order
        self._waiting: list[ev.StartCopy] = []

    def register(self, key: AttemptKey, num_tokens: int, hit: int = 0) -> None:
        """D wants all but its first `hit` tokens."""
        groups = self.d.layout.groups
        wanted = {group.name: group.wanted(num_tokens, hit) for group in groups}
        pages = self.d.layout.kernel_tables(self.d.blocks)
        self._feed(ev.Received(Register(key, ticket="t", wanted=wanted, pages=pages)))

    @property
    def told(self) -> list[LegEvent]:
        """Of layers."""
        return [event for _, event in self.posted if isinstance(event, ev.LayersWritten | ev.LayersWithdrawn)]

    def _handle(self, key: AttemptKey, event: LegEvent) -> None:
        match event:
            case PrefillLeg(ticket):
                self.machine = PrefillHandoff(key, ticket.mode, "t", sorted(self.p.layout.geometries))
                self._feed(ev.Opened())
            case GiveUp(reason):
                self._feed(ev.Abort(reason))
            case ev.PagesGiven() | ev.Declared() | ev.LayersWritten() | ev.LayersWithdrawn() | ev.Sampled():
                self._feed(event)

    def _feed(self, event: ev.MachineEvent) -> None:
        for action in self.machine.handle(event):
            if isinstance(action, ev.StartCopy):
                self._waiting.append(action)
            self.commit |= isinstance(action, ev.Send) and isinstance(action.message, Commit)
            self.aborted |= isinstance(action, ev.Notify) and not self.commit
        if not self.late:
            self.run()

    def run(self) -> None:
        while self._waiting:
            copy = self._waiting.pop(0)
            source, dest = self.p.layout.geometries[copy.group], self.d.layout.geometries[copy.group]
            ids = source.geometry.layer_ids
            self.copied += [(copy.group, layer) for layer in ids if layer in range(copy.layers.start, copy.layers.stop)]
            tables = (copy.source_pages, copy.dest_pages)
            for runs in plan_copies([source], dest, *tables, copy.tokens, copy.layers).values():
                read, write = _bytes(self.p, runs.source_region), _bytes(self.d, runs.dest_region)
                for at, to, size in zip(runs.source_offset, runs.dest_offset, runs.nbytes, strict=True):
                    write[to : to + size] = read[at : at + size]
            self._feed(ev.CopyEnded(copy.copy_id, ok=True, num_bytes=1, num_runs=1))


class Pair:
    """P, whose worker streams layers, and D; a prompt of `length` tokens, all but the last of which are handed over."""

    def __init__(self, length: int, kv_stream: KVStream = "layer", mode: str = "push", hit: int = 0) -> None:
        self.tokens = list(range(200, 200 + length))
        self.p, self.d = Engine("P", 8, with_states=False), Engine("D", 4, with_states=False)
        self.agent = Agent(self.p, self.d)
        self.worker = WorkerSide(self.p.layout, kv_stream=kv_stream)
        self.worker.bind(self.agent)
        self.ticket = msgspec.structs.replace(SignedTicket.of(make_ticket(), "signed"), mode=mode)
        self.worker.begin(StepNews(opened=[OpenPrefill("r", self.ticket, self.num_tokens, self.tokens[-1])]))
        self.d.reserve(length + LOOKAHEAD)
        if hit:
            self.d.compute(self.tokens, 0, hit)
        self.agent.register(self.ticket.key, self.num_tokens, hit)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - 1

    def computed(self, stop: int) -> list[ComputedTokens]:
        self.p.reserve(stop + LOOKAHEAD)
        return [ComputedTokens(self.ticket.key, stop, tuple(list(table) for table in self.p.blocks))]

    def write(self, layer: int, start: int, stop: int) -> None:
        """A layer of the forward over tokens [start, stop), and rows of guesses after them."""
        table = 1 if layer == 3 else 0
        for token in range(start, stop):
            value = entry_of(layer, [*self.tokens, -7][: token + (2 if layer == DRAFTER else 1)])
            self.p.slot(table, layer, token)[:] = value
        if table == 0:
            for token in range(stop, stop + LOOKAHEAD):
                self.p.slot(table, layer, token)[:] = GARBAGE

    def step(
        self, start: int, stop: int, hook: Callable[[int], None] | None = None, once: bool = False, drafts: int = 2
    ) -> None:
        """A step as in vLLM: the target's layers, each with its hook, then the drafter, several times. `once`: the
        worker is told that the drafter runs once."""
        computed = self.computed(stop)
        self.worker.begin(StepNews(computed=computed), drafts_once=once)
        for layer in TARGET_LAYERS:
            self.write(layer, start, stop)
            (hook or self.tell)(layer)
        for _ in range(drafts):
            self.write(DRAFTER, start, stop)
            self.tell(DRAFTER)
        self.worker.finalise(computed)

    def tell(self, layer: int) -> None:
        self.worker.layer_written(layer_name(layer))

    def steps(self, chunk: int, once: bool = False, drafts: int = 2) -> None:
        length = len(self.tokens)
        for start in range(0, length, chunk):
            self.step(start, min(start + chunk, length), once=once, drafts=drafts)

    def wrong(self) -> list[str]:
        """Entries that D would continue from and that differ from what it would have computed."""
        assert self.agent.commit
        return _wrong(self.d, self.tokens, self.num_tokens)


@pytest.mark.parametrize("length", [2, 5, 9, 12, 13, 17, 25])
@pytest.mark.parametrize("chunk", [1, 5, 8, 100])
@pytest.mark.parametrize("late", [False, True])
def test_what_arrives_is_right_at_every_length(length: int, chunk: int, late: bool) -> None:
    two = Pair(length)
    two.agent.late = late
    two.steps(chunk)
    two.agent.run()
    assert two.wrong() == []
    streamed = {name for event in two.agent.told if isinstance(event, ev.LayersWritten) for name in event.final}
    assert streamed
    assert all(name.startswith("target.") for name in streamed), "a drafter writes its entries several times"


@pytest.mark.parametrize("length", [2, 9, 13, 25])
@pytest.mark.parametrize("chunk", [1, 8, 100])
@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_a_drafter_that_runs_once_is_streamed_too(length: int, chunk: int, drafts: int) -> None:
    """If it then runs twice, its entries are copied again; if it does not run, they are copied with the step."""
    two = Pair(length)
    if drafts == 0:
        two.p.reserve(length + LOOKAHEAD)
        two.write(DRAFTER, 0, length)
    two.steps(chunk, once=True, drafts=drafts)
    assert two.wrong() == []
    streamed = {name for event in two.agent.told if isinstance(event, ev.LayersWritten) for name in event.final}
    assert any(name.startswith("draft.") for name in streamed) == (drafts > 0)
    assert any(isinstance(event, ev.LayersWithdrawn) for event in two.agent.told) == (drafts == 2)


def test_a_drafters_layer_is_copied_before_the_end_of_the_step() -> None:
    two = Pair(25)
    computed = two.computed(25)
    two.worker.begin(StepNews(computed=computed), drafts_once=True)
    for layer in (*TARGET_LAYERS, DRAFTER):
        two.write(layer, 0, 25)
        two.tell(layer)
    before = [(group.partition(".")[0], layer) for group, layer in two.agent.copied]
    assert before == [*(("target", layer) for layer in TARGET_LAYERS), ("draft", DRAFTER)]
    two.worker.finalise(computed)
    assert two.wrong() == []


def test_layers_are_copied_while_later_ones_are_computed_and_once() -> None:
    two = Pair(25)
    seen: list[int] = []

    def hook(layer: int) -> None:
        two.tell(layer)
        seen.append(len(two.agent.copied))

    two.step(0, 16, hook)
    assert seen == [1, 2, 3, 3], "D wants a window's last tokens alone"
    two.step(16, 25)
    assert two.wrong() == []
    target = [layer for group, layer in two.agent.copied if group.startswith("target")]
    assert sorted(target) == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("length", [13, 25])
def test_a_layer_that_is_told_before_it_is_written_is_caught(length: int) -> None:
    """Otherwise the tests above would prove nothing."""
    two = Pair(length)
    computed = two.computed(length)
    two.worker.begin(StepNews(computed=computed))
    for layer in TARGET_LAYERS:
        two.tell(layer)
        two.write(layer, 0, length)
    two.write(DRAFTER, 0, length)
    two.worker.finalise(computed)
    assert any(wrong.startswith("layer 0,") for wrong in two.wrong())


@pytest.mark.parametrize("again", ["fails", "repeats"])
def test_what_is_written_again_is_copied_again(again: str) -> None:
    """A forward that fails after some of its layers, or one that computes a layer twice."""
    two = Pair(25)
    two.worker.begin(StepNews(computed=two.computed(25)))
    for layer in (0, 1):
        two.p.slot(0, layer, 3)[:] = GARBAGE
        two.tell(layer)
    # The copy of the layers that will be written again is in progress, and ends late.
    two.agent.late = True
    if again == "repeats":
        for layer in (0, 1):
            two.write(layer, 0, 25)
            two.tell(layer)
        for layer in (2, 3, DRAFTER):
            two.write(layer, 0, 25)
            two.tell(layer)
        two.worker.finalise(two.computed(25))
    else:
        two.step(0, 25)
    assert sum(isinstance(event, ev.LayersWithdrawn) for event in two.agent.told) == 1
    assert not two.agent.commit
    two.agent.run()
    assert two.wrong() == []


def test_layers_after_a_missing_one_wait_for_the_end_of_the_step() -> None:
    """Also if a layer's hook never comes."""
    two = Pair(25)
    computed = two.computed(25)
    two.worker.begin(StepNews(computed=computed))
    for layer in (0, 2, 3):
        two.write(layer, 0, 25)
        two.tell(layer)
    assert {layer for _, layer in two.agent.copied} == {0}
    two.write(1, 0, 25)
    two.write(DRAFTER, 0, 25)
    two.worker.finalise(computed)
    assert two.wrong() == []


@pytest.mark.parametrize("end", ["preempted", "cancelled", "released"])
def test_a_leg_that_is_given_up_is_told_of_no_more(end: str) -> None:
    """Preempted, cancelled by D, or released because the peer died."""
    two = Pair(25)
    two.step(0, 16)
    num_told = len(two.agent.told)
    if end == "preempted":
        two.worker.release_preempted([two.ticket.key])
    elif end == "cancelled":
        two.worker.begin(StepNews(cancelled=[two.ticket.key]))
    if end != "preempted":
        two.worker.post(ev.PrefillReleased(two.ticket.key, "peer_lost"))
        two.worker.results()
    copied = list(two.agent.copied)
    two.step(16, 25)
    assert two.agent.copied == copied or end == "released"
    assert len(two.agent.told) == num_told
    two.worker.begin(StepNews(closed=[ClosePrefill(two.ticket.key, held=False, failed=True)]))


def test_a_prefix_that_either_side_has() -> None:
    two = Pair(25, hit=12)
    two.p.reserve(16 + LOOKAHEAD)
    two.p.compute(two.tokens, 0, 16)
    two.step(16, 25)
    assert two.wrong() == []


@pytest.mark.parametrize(("kv_stream", "declared"), [("off", 1), ("chunk", 3), ("layer", 3)])
def test_when_tokens_are_declared_final(kv_stream: KVStream, declared: int) -> None:
    two = Pair(25, kv_stream)
    two.steps(8)
    assert two.wrong() == []
    # A fourth step computes the token that is not handed over.
    assert len(two.agent.of(ev.Declared)) == declared
    assert bool(two.agent.told) == (kv_stream == "layer")


def test_what_is_not_worth_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = Pair(25, mode="pull")
    pulled.steps(8)
    assert pulled.agent.told == []
    layer_bytes = 2 * 4 * 24  # a head of two float32
    for num_layers, stops in ((0, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (8, [4]), (9, [])):
        monkeypatch.setattr(layer_stream, "MIN_BYTES", num_layers * layer_bytes)
        two = Pair(25)
        two.steps(100)
        told = [event.layers for event in two.agent.told if isinstance(event, ev.LayersWritten)]
        assert told == stops
        assert two.wrong() == []


@pytest.mark.parametrize(
    ("device", "version", "asked", "found"),
    [
        ("cpu", "0.32", None, "layer"),
        ("cpu", "0.32", "chunk", "chunk"),
        ("cuda", "0.32", None, "chunk"),
        ("cuda", "0.32", "off", "off"),
        ("cpu", "0.31", None, "chunk"),
        ("cuda", "0.32", "layer", None),
        ("cpu", "0.31", "layer", None),
    ],
)
def test_by_layer_only_where_a_hook_says_that_a_layer_is_written(
    device: str, version: str, asked: KVStream | None, found: KVStream | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "check_version", lambda: version)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    if found is not None:
        assert support.stream_of(config, asked) == found
    else:
        with pytest.raises(ConfigError, match="kv_stream"):
            support.stream_of(config, asked)


def test_a_word_that_is_none_of_them_is_refused() -> None:
    assert read_config({"keys": "k"}).kv_stream is None
    with pytest.raises(ConfigError, match="kv_stream"):
        read_config({"keys": "k", "kv_stream": "layers"})
