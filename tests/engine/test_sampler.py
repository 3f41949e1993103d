"""Sampling: the coupled verifier changes nothing, rejection preserves the distribution, parameters do their work."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.noise import gumbel, uniform
from baton.engine.sampler import SamplerState, token_logprobs
from baton.errors import RequestError
from baton.wire import SamplingParams

VOCAB = 12


def state(prompt: tuple[int, ...] = (1, 2), **params: object) -> SamplerState:
    return SamplerState(SamplingParams(**{"max_tokens": 64, "seed": 5, **params}), prompt, VOCAB, [0])  # type: ignore[arg-type]


def logits(seed: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 2


def test_noise_is_a_function_of_its_four_arguments() -> None:
    base = gumbel(7, 0, 10, VOCAB)
    assert np.array_equal(base, gumbel(7, 0, 10, VOCAB))
    assert np.array_equal(base, gumbel(7, 0, 10, 5 * VOCAB)[:VOCAB])
    for other in (gumbel(8, 0, 10, VOCAB), gumbel(7, 1, 10, VOCAB), gumbel(7, 0, 11, VOCAB)):
        assert not np.array_equal(base, other)
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
            token = plain.verify(row[None], [], False).token_ids[0]
            plain.advance([token])
            expected.append(token)
        drafts = list(expected[:3])
        if seed % 4 < 3:
            drafts[seed % 4] = (drafts[seed % 4] + 1) % VOCAB
        verified = state(temperature=temperature, presence_penalty=penalty).verify(rows, drafts, False)
        assert verified.token_ids == expected[: verified.num_accepted + 1]
        assert verified.num_accepted == seed % 4


def test_rejection_preserves_the_target_distribution() -> None:
    """Pearson chi-square of 20,000 draws of the first token against softmax, for a likely and an unlikely draft."""
    row = logits(3, 2)
    weights = np.exp(row[0].astype(np.float64) / 0.9)
    weights /= weights.sum()
    order = np.argsort(weights)
    for draft in (int(order[-1]), int(order[2])):
        counts = np.zeros(VOCAB)
        num_accepted = 0
        for seed in range(20_000):
            verified = state(seed=seed, temperature=0.9).verify(row, [draft], True)
            counts[verified.token_ids[0]] += 1
            num_accepted += verified.num_accepted
        expected = weights * counts.sum()
        # 11 degrees of freedom: 31.3 is the 0.1% point.
        assert float(((counts - expected) ** 2 / expected).sum()) < 31.3
        assert num_accepted / 20_000 == pytest.approx(weights[draft], abs=0.015)


def test_restrictions_mask_what_they_should() -> None:
    row = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05] + [1e-9] * 7, dtype=np.float32))

    def kept(**params: object) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.isfinite(state(**params).scores(row, 0, [])))]

    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.69) == [0, 1]
    assert kept(top_p=0.71) == [0, 1, 2]
    assert kept(min_p=0.3) == [0, 1, 2]
    assert 0 not in kept(min_tokens=1)
    assert len(kept(top_k=-1)) == VOCAB


def test_bias_and_penalties_see_the_drafts_before_a_row() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    biased = state(temperature=0.0, logit_bias={7: 3.0})
    assert biased.verify(row[None], [], False).token_ids == [7]
    frequent = state(frequency_penalty=1.0)
    assert frequent.scores(row, 2, [4, 4])[4] == pytest.approx(-2.0)
    assert frequent.scores(row, 2, [4, 4])[5] == 0.0
    repeated = state(repetition_penalty=2.0)
    ones = np.ones(VOCAB, dtype=np.float32)
    assert repeated.scores(ones, 0, [])[1] == pytest.approx(0.5)
    assert repeated.scores(-ones, 0, [])[1] == pytest.approx(-2.0)
    assert repeated.scores(ones, 1, [9])[9] == pytest.approx(0.5)


def test_logprobs_are_normalised_and_sorted() -> None:
    entry = token_logprobs(logits(1)[0], 3, VOCAB)
    assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1.0)
    assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)
    assert entry.logprob == dict(entry.top)[3]


def test_every_seed_has_noise_of_its_own() -> None:
    """Also beyond 2**63, where a float no longer tells neighbours apart."""
    seeds = [0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
    assert len({gumbel(seed, 0, 10, 1)[0] for seed in seeds}) == len(seeds)
    assert len({gumbel(seed, index, 10, 1)[0] for seed in seeds for index in seeds}) == len(seeds) ** 2
    # As NumPy gives it for words that are no floats: what a stored answer was made with.
    assert gumbel(7, 0, 10, VOCAB)[0] == pytest.approx(1.1199555438670727, abs=1e-12)


def test_a_tiny_temperature_counts_as_the_least_one() -> None:
    assert SamplingParams(temperature=1e-320).normalised().temperature == 0.01
    for temperature in (0.0, 0.01, 0.7):
        params = SamplingParams(temperature=temperature)
        assert params.normalised() is params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 2.0), ("n", 0), ("seed", -1), ("presence_penalty", 3.0),
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
