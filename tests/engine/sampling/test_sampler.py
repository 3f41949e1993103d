"""Sampling: the coupled verifier changes no token, rejection sampling preserves the distribution, parameters take
effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.sampling import draft_sampler, sampler
from baton.engine.sampling.draft_sampler import DraftSampler
from baton.engine.sampling.logprobs import token_logprobs
from baton.engine.sampling.noise import gumbel, gumbel_rows, uniform
from baton.engine.sampling.sampler import choose_tokens
from baton.engine.sampling.sampling_state import SamplingRows, SamplingState, noise_of, sampling_of
from baton.engine.sampling.verifier import Verified, rejection_choice, verify
from baton.engine.step_plans import Sampling
from baton.errors import RequestError
from baton.sampling_params import SamplingParams
from baton.wire import TokenLogprobs
from tests.engine.sampling.plain_sampler import PlainSampler

VOCAB = 12


def state(prompt: tuple[int, ...] = (1, 2), **params: object) -> SamplingState:
    return SamplingState(SamplingParams(**{"max_tokens": 64, "seed": 5, **params}), prompt, VOCAB, [0])  # type: ignore[arg-type]


def logits(seed: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 2


def sampling(asked: Sequence[tuple[SamplingState, Sequence[int]]], rejection: bool = False) -> Sampling:
    """The sampling data of requests whose rows are side by side."""
    starts = np.cumsum([0, *(1 + len(drafts) for _, drafts in asked)]).tolist()
    found = sampling_of(
        [SamplingRows(one, at, drafts) for (one, drafts), at in zip(asked, starts, strict=False)], rejection
    )
    assert found is not None
    return found


def verify_all(
    asked: Sequence[tuple[SamplingState, Sequence[int]]], rows: np.ndarray, rejection: bool = False
) -> list[Verified]:
    """Verify requests with their drafts in one batch; `rows` [all rows, V]."""
    choices = choose_tokens(torch.from_numpy(rows), sampling(asked, rejection)).tolist()
    found, first = [], 0
    for _, drafts in asked:
        found.append(verify(drafts, choices, first))
        first += 1 + len(drafts)
    return found


def verify_one(one: SamplingState, rows: np.ndarray, drafts: Sequence[int]) -> Verified:
    return verify_all([(one, drafts)], rows)[0]


def processed(rows: torch.Tensor, asked: Sampling) -> torch.Tensor:
    """Scores with all processing before the noise."""
    found = sampler.process_logits(rows, asked)
    drawn = asked.noise.temperature > 0.0
    sampler._cut_nucleus(found, np.flatnonzero(drawn & (asked.top_p < 1.0)), asked.top_p)
    return found


def scores(one: SamplingState, row: np.ndarray, drafts_before: Sequence[int]) -> np.ndarray:
    """Processed logits of the row after those drafts."""
    rows = torch.from_numpy(np.stack([row] * (1 + len(drafts_before))))
    last: np.ndarray = processed(rows, sampling([(one, drafts_before)]))[-1].numpy()
    return last


def test_noise_is_a_function_of_its_four_arguments() -> None:
    base = gumbel(7, 0, 10, VOCAB)
    assert np.array_equal(base, gumbel(7, 0, 10, VOCAB))
    assert np.array_equal(base, gumbel(7, 0, 10, 5 * VOCAB)[:VOCAB])
    assert [
        other
        for other in (gumbel(8, 0, 10, VOCAB), gumbel(7, 1, 10, VOCAB), gumbel(7, 0, 11, VOCAB))
        if np.array_equal(base, other)
    ] == []
    assert 0.0 < uniform(7, 0, 10) < 1.0
    many = gumbel(1, 0, 3, 200_000)
    assert abs(many.mean() - 0.5772) < 0.01
    assert abs(many.var() - np.pi**2 / 6) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_coupled_verification_equals_one_token_at_a_time(temperature: float, penalty: float) -> None:
    for seed in range(50):
        rows = logits(seed)
        plain = state(temperature=temperature, presence_penalty=penalty)
        expected = []
        for row in rows:
            token = verify_one(plain, row[None], []).token_ids[0]
            plain.advance([token])
            expected.append(token)
        drafts = list(expected[:3])
        if seed % 4 < 3:
            drafts[seed % 4] = (drafts[seed % 4] + 1) % VOCAB
        verified = verify_one(state(temperature=temperature, presence_penalty=penalty), rows, drafts)
        assert verified.token_ids == expected[: verified.num_accepted + 1]
        assert verified.num_accepted == seed % 4


def test_rejection_preserves_the_target_distribution() -> None:
    """Pearson chi-square of 20,000 draws of the first token against softmax, for a likely and an unlikely draft."""
    row = logits(3, 2)
    weights = np.exp(row[0].astype(np.float64) / 0.9)
    weights /= weights.sum()
    order = np.argsort(weights)
    for draft in (int(order[-1]), int(order[2])):
        asked = [(state(seed=seed, temperature=0.9), [draft]) for seed in range(20_000)]
        verified = verify_all(asked, np.tile(row, (len(asked), 1)), rejection=True)
        counts = np.bincount([one.token_ids[0] for one in verified], minlength=VOCAB)
        num_accepted = sum(one.num_accepted for one in verified)
        expected = weights * counts.sum()
        # 11 degrees of freedom: 31.3 is the 0.1% point.
        assert float(((counts - expected) ** 2 / expected).sum()) < 31.3
        assert num_accepted / 20_000 == pytest.approx(weights[draft], abs=0.015)


@pytest.mark.parametrize("draft", [0, VOCAB - 1])
def test_a_draft_is_no_choice_where_every_token_is_masked(draft: int) -> None:
    """No token can be drawn there, so the draft is not accepted; the row still names a token."""
    masked = np.full(VOCAB, -np.inf)
    for uniform_draw in (0.0, 0.5):
        found = rejection_choice(masked, draft, uniform_draw, np.zeros(VOCAB))
        assert found != draft
        assert 0 <= found < VOCAB
    sole = masked.copy()
    sole[draft] = 1.0
    assert rejection_choice(sole, draft, 0.99, np.zeros(VOCAB)) == draft


def test_restrictions_mask_what_they_should() -> None:
    row = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05] + [1e-9] * 7, dtype=np.float32))

    def kept(**params: object) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.isfinite(scores(state(**params), row, [])))]

    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.69) == [0, 1]
    assert kept(top_p=0.71) == [0, 1, 2]
    assert kept(min_p=0.3) == [0, 1, 2]
    assert 0 not in kept(min_tokens=1)
    assert len(kept(top_k=-1)) == VOCAB


def test_bias_and_penalties_see_the_drafts_before_a_row() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    biased = state(temperature=0.0, logit_bias={7: 3.0})
    assert verify_one(biased, row[None], []).token_ids == [7]
    frequent = state(frequency_penalty=1.0)
    assert scores(frequent, row, [4, 4])[4] == pytest.approx(-2.0)
    assert scores(frequent, row, [4, 4])[5] == 0.0
    repeated = state(repetition_penalty=2.0)
    ones = np.ones(VOCAB, dtype=np.float32)
    assert scores(repeated, ones, [])[1] == pytest.approx(0.5)
    assert scores(repeated, -ones, [])[1] == pytest.approx(-2.0)
    assert scores(repeated, ones, [9])[9] == pytest.approx(0.5)


def any_params(random: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Every parameter that affects a choice, each left at its default half of the time."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if random.random() < 0.5 else otherwise

    ids = [int(i) for i in random.integers(0, vocab_size, 6)]
    return SamplingParams(
        max_tokens=64,
        seed=int(random.integers(0, 2**63)) * 2,
        sample_index=maybe(2**64 - 1, 0),
        temperature=maybe(float(random.uniform(0.01, 2.0)), 0.0),
        top_k=maybe(int(random.integers(1, vocab_size + 3)), -1),
        top_p=maybe(float(random.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(random.uniform(0.0, 0.3)), 0.0),
        presence_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(random.uniform(0.5, 2.0)), 1.0),
        logit_bias=maybe({i: float(random.uniform(-3, 3)) for i in ids}, None),
        stop_token_ids=tuple(ids[:2]),
        min_tokens=maybe(int(random.integers(0, 12)), 0),
    )


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("block", [1 << 19, 700])
def test_a_batch_is_sampled_as_its_requests_one_by_one(
    rejection: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, acceptance and every bit of the scores, with any neighbours and any number of blocks."""
    monkeypatch.setattr(sampler, "BLOCK_SIZE", block)
    vocab_size, num_accepted = 301, 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        asked, plain, by_request, expected = [], [], [], []
        for _ in range(9):
            params = any_params(random, vocab_size)
            prompt = random.integers(0, vocab_size, 8).tolist()
            output = random.integers(0, 40, int(random.integers(0, 10))).tolist()
            one, by_definition = (kind(params, prompt, vocab_size, [0]) for kind in (SamplingState, PlainSampler))
            one.advance(output)
            by_definition.advance(output)
            rows = (random.normal(size=(4, vocab_size)) * 3).astype(np.float32)
            drafts: list[int] = []
            while len(drafts) < 3 and random.random() < 0.8:
                drafts = by_definition.verify(rows[: len(drafts) + 1], drafts, False).token_ids
            if drafts and random.random() < 0.5:
                drafts[int(random.integers(len(drafts)))] = int(random.integers(vocab_size))
            rows = rows[: 1 + len(drafts)]
            asked.append((one, drafts))
            by_request.append(rows)
            plain += [by_definition.scores(row, j, drafts[:j]) for j, row in enumerate(rows)]
            expected.append(by_definition.verify(rows, drafts, rejection))
        together = np.concatenate(by_request)
        assert verify_all(asked, together, rejection) == expected
        assert np.array_equal(processed(torch.from_numpy(together), sampling(asked)).numpy(), np.stack(plain))
        num_accepted += sum(one.num_accepted for one in expected)
    assert num_accepted > 20


def test_noise_of_many_is_that_of_each() -> None:
    params = [SamplingParams(seed=seed, sample_index=index) for seed, index in [(0, 0), (2**64 - 1, 3), (7, 2**64 - 1)]]
    found = gumbel_rows(noise_of(params), np.array([5, 6, 2**31]), 1003)
    assert [row.tobytes() for row in found] == [
        gumbel(seed, index, position, 1003).tobytes()
        for seed, index, position in [(0, 0, 5), (2**64 - 1, 3, 6), (7, 2**64 - 1, 2**31)]
    ]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("block", [1 << 19, 700])
@pytest.mark.parametrize("temperatures", [[0.0, 0.7, 1.3, 0.0, 0.2, 0.9, 0.5], [0.0] * 7])
def test_drafts_are_picked_as_the_target_would(
    mapped: bool, block: int, temperatures: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By definition: argmax of logits over temperature plus the noise of the target's ids."""
    monkeypatch.setattr(draft_sampler, "BLOCK_SIZE", block)
    vocab_size = 301
    random = np.random.default_rng(3)
    target_ids = np.sort(random.permutation(vocab_size)[:100]) if mapped else np.arange(vocab_size)
    logits = random.normal(size=(6, len(target_ids))).astype(np.float32)
    params = [SamplingParams(seed=i, temperature=t) for i, t in enumerate(temperatures)]
    first, requests, step = np.arange(20, 27), np.array([0, 1, 2, 4, 5, 6]), 2
    margins = np.full((7, step + 1), np.inf)
    picked = DraftSampler(noise_of(params), first, vocab_size, margins=margins)(
        torch.from_numpy(logits), requests, step, torch.from_numpy(target_ids) if mapped else None
    )
    expected, by_hand = [], np.full_like(margins, np.inf)
    for row, request in zip(logits, requests.tolist(), strict=True):
        noise = gumbel(request, 0, int(first[request]) + step, vocab_size)[target_ids]
        temperature = params[request].temperature
        noisy = row.astype(np.float64) / temperature + noise if temperature else row
        expected.append(int(target_ids[np.argmax(noisy)]))
        second, best = np.sort(noisy)[-2:].astype(np.float64)
        by_hand[request, step] = best - second
    assert picked.tolist() == expected
    np.testing.assert_array_equal(margins, by_hand)


def test_logprobs_are_normalised_and_sorted() -> None:
    (entry,) = token_logprobs(logits(1)[:1], [3], [VOCAB])
    assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1.0)
    assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)
    assert entry.logprob == dict(entry.top)[3]


def test_logprobs_of_a_row_are_those_by_definition_in_any_batch() -> None:
    """To the bit, with ties, for any number of tokens."""
    random = np.random.default_rng(7)
    rows = random.normal(size=(9, 1031)).astype(np.float32)
    rows[::2] = np.round(rows[::2])
    num_top, token_ids = [0, 1, 2, 5, 20, 20, 1030, 1031, 2000], random.integers(0, 1031, 9).tolist()
    expected = []
    for row, token, count in zip(rows, token_ids, num_top, strict=True):
        wide = row.astype(np.float64)
        wide -= wide.max()
        wide -= np.log(np.exp(wide).sum())
        top = [(int(i), float(wide[i])) for i in np.argsort(-wide, kind="stable")[:count]]
        expected.append(TokenLogprobs(float(wide[token]), top))
    assert token_logprobs(rows, token_ids, num_top) == expected
    for at in range(len(rows)):
        assert token_logprobs(rows[at : at + 1], token_ids[at : at + 1], num_top[at : at + 1]) == [expected[at]]
    ranked = token_logprobs(rows, token_ids, num_top, ranks=True)
    assert [one.rank for one in ranked] == [
        int((row > row[i]).sum()) + 1 for row, i in zip(rows, token_ids, strict=True)
    ]


def test_every_seed_has_noise_of_its_own() -> None:
    """Also beyond 2**63, where floats no longer distinguish neighbours."""
    seeds = [0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
    assert len({gumbel(seed, 0, 10, 1)[0] for seed in seeds}) == len(seeds)
    assert len({gumbel(seed, index, 10, 1)[0] for seed in seeds for index in seeds}) == len(seeds) ** 2
    # As NumPy gives it for words that are not floats: stored answers were made with it.
    assert gumbel(7, 0, 10, VOCAB)[0] == pytest.approx(1.1199555438670727, abs=1e-12)


def test_a_tiny_temperature_counts_as_the_least_one() -> None:
    assert SamplingParams(temperature=1e-320).normalised().temperature == 0.01


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7])
def test_other_temperatures_stay(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert params.normalised() is params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 2.0), ("n", 0), ("seed", -(2**63) - 1), ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0), ("repetition_penalty", 0.0), ("logprobs", 99), ("logit_bias", {99: 1.0}),
        ("min_tokens", 99), ("stop", ("",)), ("stop", ("x" * 1025,)), ("stop", ("x",) * 17), ("seed", 2**64),
        ("sample_index", 2**64), ("sample_index", -1), ("stop_token_ids", (-1,)), ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (-1000000000,)), ("stop_token_ids", (1,) * 1025), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}), ("repetition_penalty", 1e-320), ("repetition_penalty", float("inf")),
        ("max_tokens", 2**31), ("top_k", 2**31),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value}).check(VOCAB)  # type: ignore[arg-type]
    assert caught.value.param == name
    assert name in str(caught.value)
