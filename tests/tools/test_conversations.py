"""Conversations in lockstep, and training on them, with a model too small to say anything."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_training.conversations import Lockstep, Turns, converse

END = 2


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def test_lockstep_equals_transformers(model):
    ids = torch.randint(0, 40, (3, 17))
    lockstep = Lockstep(model, 3, 17)
    ours = torch.stack([lockstep.step(ids[:, i], i) for i in range(17)], 1)
    with torch.no_grad():
        torch.testing.assert_close(ours, model(ids).logits, atol=1e-5, rtol=1e-4)


def test_turns_alternate_and_their_fixed_parts_are_whole(model):
    turns = Turns((1, 5, 6), (7, 8), (9, 10, 11), END, max_question=6, max_answer=9)
    ids, answered = converse(model, turns, rows=8, length=90, temperature=0.8, seed=1)
    assert ids.shape == answered.shape == (8, 90)
    again, _ = converse(model, turns, rows=8, length=90, temperature=0.8, seed=1)
    assert torch.equal(ids, again)
    for row, spoken in zip(ids.tolist(), answered.tolist(), strict=True):
        at, answering, turn = 0, False, 0
        opening = turns.system
        while at < len(row):
            part = row[at : at + len(opening)]
            assert part == list(opening)[: len(part)]
            assert not any(spoken[at : at + len(opening)])
            at += len(opening)
            end = next((i for i in range(at, len(row)) if row[i] == END), None)
            stop = len(row) if end is None else end + 1
            assert stop - at <= 1 + (turns.max_answer if answering else turns.max_question)
            assert spoken[at:stop] == [answering] * (stop - at)
            at, answering, turn = stop, not answering, turn + 1
            opening = turns.answer if answering else turns.ask
        assert turn > 3


def test_the_last_rows_begin_with_the_questions_given(model):
    turns = Turns((1, 5), (7,), (9,), END, 4, 12)
    given = [[20, 21, END], [22, 23, 24, 25, 26, 27, END]]  # the second is longer than a sampled question may be
    ids, answered = converse(model, turns, rows=5, length=40, temperature=0.9, seed=3, questions=given)
    assert ids[3, :6].tolist() == [1, 5, 20, 21, END, 7]
    assert ids[4, :10].tolist() == [1, 5, 22, 23, 24, 25, 26, 27, END, 7]
    assert not answered[3, :6].any()
    assert answered[3, 6]
    assert not answered[4, :10].any()
    assert answered[4, 10]


def test_greedy_answers_are_the_models_argmax(model):
    ids, answered = converse(model, Turns((1, 5), (7,), (9,), END, 4, 12), rows=4, length=60, temperature=0.9, seed=3)
    with torch.no_grad():
        argmax = model(ids).logits.argmax(-1)
    for row in (0, 2):  # even rows answer greedily
        said = answered[row, 1:] & (ids[row, 1:] != END)
        assert torch.equal(ids[row, 1:][said], argmax[row, :-1][said])
        assert said.sum() > 5
