"""The connector's half in the scheduler, without vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from baton.handoff.protocol.ticket import SignedTicket, Ticket, sign_ticket
from baton.vllm.memory.groups import CacheTable
from baton.vllm.scheduler import SchedulerSide, VllmIdentity, handoff_digest
from baton.vllm.steps import AnnounceDecode, ClosePrefill, ComputedTokens, OpenDecode, OpenPrefill, StepNews
from testkit.handoffs.tickets import make_ticket, signed

KEY = b"k" * 32
NOW = 1000.0
PROMPT = list(range(100, 110))


@dataclass
class Lora:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Request:
    request_id: str
    prompt_token_ids: Sequence[int] | None
    kv_transfer_params: dict[str, Any] | None
    max_tokens: int = 1
    output_token_ids: Sequence[int] = ()
    prompt_embeds: Any = None
    lora_request: Any = None
    mm_features: Sequence[Any] = field(default_factory=list)


def ticket(prompt: Sequence[int] = PROMPT, incarnation: str = "inc-P", adapter: str = "") -> SignedTicket:
    plain = make_ticket(
        prefill_incarnation=incarnation,
        decode_incarnation="inc-D",
        prefill_expiry=NOW + 60,
        decode_expiry=NOW + 60,
        request_digest=handoff_digest(prompt[:-1], adapter),
    )
    return signed(plain, KEY)


class Pool:
    """Counts references. A block is its number."""

    def __init__(self) -> None:
        self.blocks = list(range(100))
        self.references: Counter[int] = Counter()

    def touch(self, blocks: Sequence[int]) -> None:
        self.references.update(blocks)

    def free_blocks(self, ordered_blocks: Sequence[int]) -> None:
        self.references.subtract(ordered_blocks)


FULL = CacheTable(0, "full", None, 4, ())


def side(
    engine: str,
    truncate: bool = False,
    roles: Sequence[str] = ("prefill", "decode"),
    tables: Sequence[CacheTable] = (FULL,),
    pool: Pool | None = None,
    num_workers: int = 1,
    window_tile: int = 1,
) -> SchedulerSide:
    addresses = [f"tcp://127.0.0.1:{rank + 1}" for rank in range(num_workers)]
    identity = VllmIdentity(
        engine, f"inc-{engine}", addresses, "{}", 512, [2], 0, truncate_prefill=truncate, roles=list(roles)
    )
    return SchedulerSide(identity, KEY, tables, pool or Pool(), clock=lambda: NOW, window_tile=window_tile)


def leg(role: Literal["prefill", "decode"], t: Ticket, prompt: Sequence[int] | None = PROMPT, **kw: Any) -> Request:
    return Request(f"{role}-1", prompt, {"baton": {"role": role, "ticket": sign_ticket(KEY, t)}}, **kw)


def test_a_decode_leg_waits_for_all_workers() -> None:
    d = side("D", num_workers=2)
    d.on_new_request(leg("decode", ticket()))
    # One worker may report twice: its leg was admitted, and then it failed.
    for _ in range(2):
        d.on_admitted([(1, "decode-1")])
        assert d.num_matched("decode-1", 0) is None
    d.on_admitted([(0, "decode-1")])
    assert d.num_matched("decode-1", 0) == 9


def test_a_prefill_leg_is_announced_computed_and_held() -> None:
    p, t = side("P"), ticket()
    request = leg("prefill", t)
    p.on_new_request(request)
    assert p.has_news()
    assert p.take_step().opened == [OpenPrefill("prefill-1", t, 9, 109)]
    assert not p.has_news()
    p.on_scheduled("prefill-1", 4, ([1], [7]), replace=True)
    p.on_scheduled("prefill-1", 10, ([2, 3], [8]), replace=False)
    step = p.take_step()
    assert step.admitted == [t.key]
    assert step.computed == [ComputedTokens(t.key, 4, ([1], [7])), ComputedTokens(t.key, 10, ([1, 2, 3], [7, 8]))]
    p.on_scheduled("prefill-1", 11, None, replace=False)
    assert p.on_finished(request) == (True, None)
    step = p.take_step()
    assert (step.computed, step.closed) == ([], [ClosePrefill(t.key, held=True, failed=False)])


def test_a_step_computes_prefill_legs_alone_or_another_request_too() -> None:
    p, request = side("P"), leg("prefill", ticket())
    p.on_new_request(request)
    assert p.only_prefills({"prefill-1": 10})
    assert not p.only_prefills({"prefill-1": 10, "another": 1})
    assert not p.only_prefills({})
    p.on_finished(request)
    assert not p.only_prefills({"prefill-1": 1})


def test_when_only_the_end_of_a_handoff_can_change_anything() -> None:
    d, other = side("D"), Request("other", PROMPT, None)
    assert d.is_parked(), "no request is left, perhaps blocks that are held"
    d.on_new_request(leg("decode", ticket()))
    assert not d.is_parked(), "it may get blocks"
    d.on_admitted([(0, "decode-1")])
    d.on_allocated("decode-1", ([1, 2, 3],), num_external=9)
    assert d.is_parked()
    d.on_new_request(other)
    assert not d.is_parked(), "vLLM may wait for its grammar"
    d.on_finished(other)
    assert d.is_parked()
    d.on_received("decode-1")
    assert not d.is_parked()


@pytest.mark.parametrize("end", ["sent", "preempted", "aborted"])
def test_the_first_block_of_a_window_outlives_its_request(end: str) -> None:
    # The decode engine computes token 9 and sees keys 4 to 9; vLLM, which has computed it, keeps those from 5 on.
    pool = Pool()
    p = side("P", tables=[FULL, CacheTable(1, "sliding_window", 6, 5, ())], pool=pool)
    request = leg("prefill", ticket())
    p.on_new_request(request)
    p.on_scheduled("prefill-1", 9 if end == "aborted" else 10, ([1, 2, 3], [7, 8]), replace=True)
    p.on_scheduled("prefill-1", 11, None, replace=False)
    assert pool.references[7] == 1
    if end == "preempted":
        p.on_preempted({"prefill-1"})
        assert pool.references[7] == 0
    held, _ = p.on_finished(request)
    assert held == (end != "preempted")
    if held:
        assert pool.references[7] == 1
        p.on_sent("prefill-1")
    p.on_sent("prefill-1")
    assert set(pool.references.values()) == {0}


def test_a_prefill_leg_that_ends_early_is_given_up() -> None:
    p, t = side("P"), ticket()
    request = leg("prefill", t)
    p.on_new_request(request)
    assert p.on_finished(request) == (False, None)
    assert p.take_step().closed == [ClosePrefill(t.key, held=False, failed=True)]
    p.on_new_request(leg("prefill", other := ticket()))
    p.on_scheduled("prefill-1", 4, ([1], [2]), replace=True)
    assert p.on_finished(request) == (True, None)
    assert p.take_step().closed == [ClosePrefill(other.key, held=True, failed=True)]


def test_a_preempted_prefill_leg_is_lost_but_goes_on() -> None:
    p, t = side("P"), ticket()
    request = leg("prefill", t)
    p.on_new_request(request)
    p.on_scheduled("prefill-1", 4, ([1], [2]), replace=True)
    p.on_preempted({"prefill-1", "other"})
    p.on_preempted({"prefill-1"})
    assert p.take_step().preempted == [t.key]
    p.on_scheduled("prefill-1", 10, ([5], [6]), replace=True)
    assert p.take_step() == StepNews()
    # Its new blocks were never exposed.
    assert p.on_finished(request) == (False, None)
    assert p.take_step().closed == [ClosePrefill(t.key, held=False, failed=True)]


def test_a_leg_that_ends_before_its_preemption_is_told_of_is_lost() -> None:
    # `reset_prefix_cache` preempts between two steps: it is reported only with the next one.
    pool = Pool()
    p, t = side("P", tables=[FULL, CacheTable(1, "sliding_window", 6, 5, ())], pool=pool), ticket()
    request = leg("prefill", t)
    p.on_new_request(request)
    p.on_scheduled("prefill-1", 10, ([1, 2, 3], [7, 8]), replace=True)
    p.take_step()
    assert p.on_finished(request) == (True, None)
    p.on_preempted({"prefill-1"})
    step = p.take_step()
    assert (step.preempted, step.closed) == ([t.key], [ClosePrefill(t.key, held=True, failed=False)])
    p.on_sent("prefill-1")
    assert set(pool.references.values()) == {0}


def test_a_prefill_leg_that_would_decode_is_refused() -> None:
    # Its states would advance, and its windows free blocks, while they are copied.
    p = side("P")
    t = ticket()
    p.on_new_request(leg("prefill", t, max_tokens=2))
    step = p.take_step()
    assert (step.opened, step.turned_away) == ([], [t]), "the decode engine need not wait for it"
    assert list(p.refused) == ["a prefill leg samples one token"]
    forged = Request(
        "prefill-2", PROMPT, {"baton": {"role": "prefill", "ticket": sign_ticket(b"z" * 32, t)}}, max_tokens=2
    )
    p.on_new_request(forged)
    assert not p.has_news()
    d = side("D")
    d.on_new_request(leg("decode", ticket(), max_tokens=2))
    assert d.has_news()


def test_what_is_turned_away_calls_off_nothing_of_others() -> None:
    p, t, strange = side("P"), ticket(), ticket(incarnation="before-a-restart")
    p.on_new_request(leg("prefill", strange, max_tokens=2))
    assert not p.has_news(), "the agent takes no ticket of another engine, and would end this one's worker"
    p.on_new_request(leg("prefill", t))
    p.take_step()
    p.on_new_request(leg("prefill", t, max_tokens=2))
    assert not p.has_news(), "the leg that the ticket was good for goes on"


def test_a_decode_leg_waits_for_all_but_the_last_token() -> None:
    d, t = side("D"), ticket()
    request = leg("decode", t)
    d.on_new_request(request)
    assert d.take_step() == StepNews(announced=[AnnounceDecode("decode-1", t, 109)])
    # Blocks taken before the other engine has its own could be those that the other engine waits for.
    assert d.num_matched("decode-1", 4) is None
    d.on_admitted({(0, "decode-1"), (0, "another")})
    assert d.num_matched("decode-1", 4) == 5
    assert d.num_matched("decode-1", 4) == 5
    d.on_allocated("decode-1", ([1, 2],), 5)
    d.on_allocated("decode-1", ([1, 2, 3],), 0)
    assert d.take_step().receives == [OpenDecode("decode-1", t, 9, 4, ([1, 2],), parked=True)]
    assert d.num_matched("decode-1", 0) == 0
    d.on_received("decode-1")
    # vLLM asks again after a failed receive: this time it computes.
    assert d.num_matched("decode-1", 0) == 0
    assert d.on_finished(request) == (False, None)
    assert not d.has_news()


def test_a_decode_leg_that_has_everything_tells_the_other_side() -> None:
    d, t = side("D"), ticket()
    request = leg("decode", t)
    d.on_new_request(request)
    assert d.num_matched("decode-1", 9) == 0
    d.on_allocated("decode-1", ([1, 2],), 0)
    (receive,) = d.take_step().receives
    assert (receive.parked, receive.hit) == (False, 9)
    assert d.on_finished(request) == (False, None)
    assert not d.has_news()


@pytest.mark.parametrize("receiving", [True, False])
def test_an_aborted_decode_leg(receiving: bool) -> None:
    d, t = side("D"), ticket()
    request = leg("decode", t)
    d.on_new_request(request)
    if receiving:
        d.on_admitted([(0, "decode-1")])
        d.on_allocated("decode-1", ([1, 2],), 9)
        d.take_step()
    assert d.on_finished(request) == (False, None)
    assert d.take_step().aborted == [t.key]


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [[1 << 40]]},
        {"baton": None},
        {"baton": {"role": "decode", "ticket": "x" * 5000}},
        {"baton": {"role": "decode", "ticket": sign_ticket(b"z" * 32, ticket())}},
        {"baton": {"role": "decode", "ticket": sign_ticket(KEY, ticket(PROMPT[1:]))}},
        {"baton": {"role": "decode", "ticket": sign_ticket(KEY, ticket()), "remote_host": "10.0.0.1"}},
        {"baton": {"role": "source", "ticket": 5}},
        {"baton": [1] * 1000},
        *("baton", 5, ["baton"]),  # as `vllm_xargs` may have it
    ],
)
def test_hostile_params_change_nothing(params: Any) -> None:
    d = side("D")
    request = Request("decode-1", PROMPT, params)
    d.on_new_request(request)
    assert d.num_matched("decode-1", 0) == 0
    d.on_allocated("decode-1", ([1],), 0)
    assert d.on_finished(request) == (False, None)
    assert not d.has_news()


def test_a_ticket_serves_one_leg_once() -> None:
    d, t = side("D"), ticket()
    d.on_new_request(leg("decode", t))
    d.on_new_request(Request("decode-2", PROMPT, leg("decode", t).kv_transfer_params))
    assert (d.num_matched("decode-1", 0), d.num_matched("decode-2", 0)) == (None, 0)
    assert list(d.refused) == ["the ticket was used before"]


def test_reasons_are_few_whatever_a_client_writes(caplog: pytest.LogCaptureFixture) -> None:
    d = side("D")
    for number in range(3):
        hostile = Request("r", PROMPT, {"baton": {"role": "identify", f"{number}" * 100_000: 1}})
        d.on_new_request(hostile)
        assert d.on_finished(hostile) == (False, None)
    assert d.refused == {"kv_transfer_params are malformed": 3}
    assert max(len(record.getMessage()) for record in caplog.records) < 500


def test_a_proxy_of_another_connector_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Else both servers would compute its prompts, and nobody would notice."""
    p = side("P")
    p.on_new_request(Request("r", PROMPT, {"do_remote_decode": True, "do_remote_prefill": False}))
    assert p.refused == {"kv_transfer_params are another connector's": 1}
    assert "served without a handoff: kv_transfer_params are another connector's" in caplog.text
    for nothing in (None, {}):
        p.on_new_request(Request("s", PROMPT, nothing))
    assert p.refused.total() == 1
    assert not p.has_news()


@pytest.mark.parametrize(
    ("request_kw", "why"),
    [
        (
            {"lora_request": Lora("a", 1, "/nowhere")},
            "a LoRA adapter without a directory here, or with files that have changed",
        ),
        ({"mm_features": [object()]}, "images or other media"),
        ({"prompt": None}, "embeddings"),
        ({"prompt_embeds": object()}, "embeddings"),
    ],
)
def test_what_the_prompt_alone_does_not_decide_is_not_handed_off(request_kw: dict[str, Any], why: str) -> None:
    d = side("D")
    d.on_new_request(leg("decode", ticket(), **request_kw))
    assert d.num_matched("decode-1", 0) == 0
    assert d.refused == {f"its KV depends on {why}, not on token ids alone": 1}


def told_adapter(engine: SchedulerSide, lora: Lora) -> str:
    asked = Request("who", [5], {"baton": {"role": "identify"}}, lora_request=lora)
    engine.on_new_request(asked)
    _, answer = engine.on_finished(asked)
    assert answer is not None
    return str(answer["baton"]["adapter"])


def adapter_in(folder: Path, content: bytes = b"weights") -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(("content", "handed_over"), [(b"weights", True), (b"others", False)])
def test_an_adapter_is_handed_off_to_an_engine_with_the_same_files(
    tmp_path: Path, content: bytes, handed_over: bool
) -> None:
    p, d = side("P"), side("D")
    here, there = Lora("a", 1, adapter_in(tmp_path / "p")), Lora("a", 7, adapter_in(tmp_path / "d", content))
    adapter = told_adapter(p, here)
    assert adapter.startswith("a@")
    assert (told_adapter(d, there) == adapter) == handed_over
    t = ticket(adapter=adapter)
    p.on_new_request(leg("prefill", t, lora_request=here))
    assert len(p.take_step().opened) == 1
    d.on_new_request(leg("decode", t, lora_request=there))
    assert len(d.take_step().announced) == handed_over
    assert d.refused.total() == (not handed_over)


@pytest.mark.parametrize("other", [None, "of another name"])
def test_a_ticket_for_one_adapter_is_for_no_other(tmp_path: Path, other: str | None) -> None:
    d, path = side("D"), adapter_in(tmp_path / "d")
    t = ticket(adapter=told_adapter(d, Lora("a", 1, path)))
    d.on_new_request(leg("decode", t, lora_request=other and Lora(other, 2, path)))
    assert d.take_step().announced == []
    assert d.refused.total() == 1


def test_an_adapter_whose_files_change_is_not_handed_off_until_it_is_loaded_again(tmp_path: Path) -> None:
    d, path = side("D"), adapter_in(tmp_path / "d")
    before = told_adapter(d, Lora("a", 1, path))
    (tmp_path / "d" / "adapter_model.safetensors").write_bytes(b"more weights")
    assert told_adapter(d, Lora("a", 1, path)) == ""
    assert told_adapter(d, Lora("a", 2, path)) not in ("", before)


def test_a_role_that_the_engine_has_not() -> None:
    p = side("P", roles=["prefill"])
    p.on_new_request(leg("decode", ticket()))
    assert list(p.refused) == ["this engine takes no decode legs"]


def test_one_token_is_no_handoff() -> None:
    d = side("D")
    d.on_new_request(leg("decode", ticket(PROMPT[:1]), PROMPT[:1]))
    assert d.num_matched("decode-1", 0) == 0
    assert not d.refused


def test_an_engine_with_states_takes_a_shorter_prompt() -> None:
    p, t = side("P", truncate=True), ticket()
    p.on_new_request(leg("prefill", t, PROMPT[:-1]))
    assert p.take_step().opened == [OpenPrefill("prefill-1", t, 9, None)]


@pytest.mark.parametrize(("num", "handed_over"), [(1, 0), (64, 0), (65, 0), (66, 64), (129, 64), (130, 128)])
def test_states_of_delta_nets_are_handed_over_where_their_kernel_ends_a_chunk(num: int, handed_over: int) -> None:
    """Two tokens are left at least: vLLM would compute one as a verification of placeholder drafts."""
    identity = msgspec.structs.replace(side("D").identity, truncate_prefill=True, prefill_multiple=64)
    assert identity.handed_over(num) == handed_over
    assert side("D").identity.handed_over(num) == num - 1


def test_who_the_engine_is() -> None:
    p = side("P")
    request = Request("r", [5], {"baton": {"role": "identify"}})
    p.on_new_request(request)
    held, answer = p.on_finished(request)
    assert not held
    assert p.on_finished(request) == (False, None)
    assert answer is not None
    assert answer["baton"] == {
        "engine_id": "P",
        "incarnation": "inc-P",
        "control_addresses": ["tcp://127.0.0.1:1"],
        "fingerprint": "{}",
        "truncate_prefill": False,
        "roles": ["prefill", "decode"],
        "prefill_multiple": 1,
        "tile": 0,
        "adapter": "",
        "moves_prefixes": False,
        "prefix_multiple": 1,
        "prefix_extra": 0,
        "vocab_size": 512,
        "eos_token_ids": [2],
        "num_speculative_tokens": 0,
        "clock": NOW,
        "data_parallel_rank": None,
        "sampling_defaults": {},
        "kv_transport": "",
        "protocol": 0,
    }
