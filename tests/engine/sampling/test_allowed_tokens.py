"""`allowed_token_ids`: no other token is chosen, by any way to choose a token, with and without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.llm import LLM
from baton.errors import RequestError
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from testkit.checkpoints.common import make_checkpoint
from testkit.engines import EAGLE3, TARGET, request, stepped
from testkit.inside import engine_of

PROMPTS = [list(range(20, 20 + n)) for n in (1, 5, 40)]
SOME = (7, 300, 301, 302, 1999, 2047)
WAYS = [
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, allowed_token_ids=SOME),
    SamplingParams(max_tokens=20, temperature=0.9, seed=3, top_p=0.9, ignore_eos=True, allowed_token_ids=SOME),
    SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=1.0, ignore_eos=True, allowed_token_ids=SOME),
    SamplingParams(max_tokens=3, temperature=0.0, allowed_token_ids=(300,)),
]


def test_no_other_token_is_chosen() -> None:
    with (
        LLM(TARGET, dtype="float32", kv_cache_memory=16 << 20) as plain,
        LLM(TARGET, dtype="float32", kv_cache_memory=16 << 20, speculative_config=EAGLE3) as drafting,
    ):
        for params in WAYS:
            alone, drafted = (
                [list(made.outputs[0].token_ids) for made in llm.generate(PROMPTS, params)] for llm in (plain, drafting)
            )
            assert alone == drafted
            assert all(set(tokens) <= set(params.allowed_token_ids or ()) for tokens in alone)
            assert all(len(tokens) == params.max_tokens for tokens in alone)
        # With a grammar, only tokens that both allow.
        tokenizer = engine_of(plain).tokenizer
        digits = {i for i in range(2048) if tokenizer.token_text(i) in ("3", "5")}
        ends = set(tokenizer.eos_token_ids)
        follows = StructuredOutputsParams(regex="[0-9]{6}")
        params = SamplingParams(
            max_tokens=20, temperature=0.0, structured_outputs=follows, allowed_token_ids=(*digits, *ends)
        )
        for llm in (plain, drafting):
            (made,) = llm.generate([PROMPTS[1]], params)
            assert set(made.outputs[0].token_ids) <= digits | ends
            assert len(made.outputs[0].text) == 6


def test_beside_a_grammar_in_a_vocabulary_that_ends_within_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path, "llama", vocab_size=260, num_hidden_layers=1)
    ways = [
        SamplingParams(max_tokens=4, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-z]{9}")),
        SamplingParams(max_tokens=4, temperature=0.0, allowed_token_ids=(7, 259)),
        SamplingParams(max_tokens=4, temperature=0.0, bad_words=("a",)),
    ]
    with stepped(model=str(model), speculative_config=None, kv_cache_memory=4 << 20) as one:
        alone = [one.run(f"alone-{i}", PROMPTS[1], params).result for i, params in enumerate(ways)]
        together = [one.add(request(f"{i}", PROMPTS[1], params)) for i, params in enumerate(ways)]
        while not all(stream.ended for stream in together):
            one.step()
    assert [stream.result for stream in together] == alone
    assert "failed" not in caplog.text


@pytest.mark.parametrize("ids", [(), (2048,), (-1,)])
def test_ids_that_are_none_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(allowed_token_ids=ids).check(2048)
    assert refused.value.param == "allowed_token_ids"
