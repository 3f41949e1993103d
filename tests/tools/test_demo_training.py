"""The training code: text, tokenizer, sampling of windows, unrolled draft steps, measuring."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tools.plain_loop import plain_loop
from tools.demo_training import measure
from tools.demo_training.corpus import Document, load_corpus, topic_documents
from tools.demo_training.distil import frequent_ids, generate_corpus, head_loss, save_head, train_head
from tools.demo_training.heads import EAGLE, EAGLE3, Eagle3Head, EagleHead, Head, draft_ids, look, unroll
from tools.demo_training.target import (
    TokenStream,
    cosine_rate,
    generate_rows,
    load_target,
    save_target,
)
from tools.demo_training.vocabulary import ASSISTANT_ID, BOS_ID, EOS_ID, SPECIAL_TOKENS, USER_ID, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([d.text for d in topic_documents()[:8]], vocab_size=400)


@pytest.fixture(scope="module")
def documents():
    return tuple(topic_documents()[:8])


@pytest.fixture(scope="module")
def stream(documents, tokenizer):
    return TokenStream(documents, tokenizer, chat=True)


def make_head(kind: str, target: LlamaForCausalLM) -> Head:
    torch.manual_seed(2)
    if kind == EAGLE:
        return EagleHead(target.config)
    return Eagle3Head(target.config, torch.arange(3, 400, 3))


def test_split_is_disjoint_and_independent_of_imports():
    corpus = load_corpus()
    trained = {document.text for document in corpus.train}
    assert not any(document.text in trained for document in corpus.held_out)
    assert 0.03 < len(corpus.held_out) / len(corpus.train) < 0.07
    # transformers, imported above, adds this method.
    assert "logging.Logger.info_once" not in {d.name for d in (*corpus.train, *corpus.held_out)}
    assert load_corpus() == corpus


def test_tokenizer_adds_one_bos_and_round_trips(tokenizer):
    text = "naïve λ: x = {'a': 1}\n\tprint(x)  # 漢字 🙂"
    ids = tokenizer.encode(text).ids
    assert ids[0] == BOS_ID
    assert BOS_ID not in ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 400
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(5))


def test_stream_holds_texts_and_chats(documents, tokenizer, stream):
    ids = stream.ids.tolist()
    starts = stream.starts.tolist()
    assert len(starts) == 2 * len(documents)
    assert all(ids[start] == BOS_ID for start in starts)
    plain, chat = ids[starts[0] : starts[1]], ids[starts[1] : starts[2]]
    assert tokenizer.decode(plain) == documents[0].text
    assert plain[-1] == EOS_ID
    assert chat[1] == USER_ID
    assert tokenizer.decode(chat[2 : chat.index(ASSISTANT_ID)]) in documents[0].questions


def test_a_cut_answer_has_no_end(tokenizer):
    documents = (Document("a", "short text", ("q",)), Document("b", "long text " * 400, ("q",)))
    stream = TokenStream(documents, tokenizer, chat=True)
    short_chat = stream.ids[stream.starts[1] : stream.starts[2]]
    long_chat = stream.ids[stream.starts[3] :]
    assert short_chat[-1] == EOS_ID
    assert EOS_ID not in long_chat


def test_half_of_a_batch_starts_at_a_document(stream):
    batch = stream.batch(np.random.default_rng(0), rows=8, length=16)
    assert batch.shape == (8, 16)
    assert (batch[1::2, 0] == BOS_ID).all()
    assert torch.equal(batch, stream.batch(np.random.default_rng(0), rows=8, length=16))


def test_rate_warms_up_and_falls():
    rates = [cosine_rate(step, 100, 1.0, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert 0.02 <= rates[-1] < 0.03


def test_greedy_rows_are_those_of_generate(target, stream):
    prompts = stream.batch(np.random.default_rng(3), 2, 8)
    rows = generate_rows(target, prompts, 12, torch.zeros(2), seed=0)
    expected = target.generate(prompts, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(rows, expected)


def test_sampled_rows_follow_their_seed(target, stream):
    prompts = stream.batch(np.random.default_rng(3), 2, 8)
    hot = torch.ones(2)
    first = generate_rows(target, prompts, 12, hot, seed=1)
    assert torch.equal(first, generate_rows(target, prompts, 12, hot, seed=1))
    assert not torch.equal(first, generate_rows(target, prompts, 12, hot, seed=2))


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_unrolled_steps_equal_the_plain_loop(kind, target, stream):
    """Training must see at every position exactly what decoding computes there."""
    head = make_head(kind, target)
    view = look(target, stream.batch(np.random.default_rng(4), 1, 20), head.aux_layers)
    embeds, features = view.embeds[:, 1:], view.features[:, :-1]
    with torch.no_grad():
        unrolled = unroll(head, embeds, features, 4)
        for known in (1, 5, 15):
            for step, state_E in enumerate(plain_loop(head, embeds, features[:, :known], 4)):
                torch.testing.assert_close(state_E, unrolled[step][0, known - 1 + step], atol=1e-5, rtol=1e-4)


def test_features_are_what_enters_the_layers(target, stream):
    ids = stream.batch(np.random.default_rng(5), 1, 8)
    seen: dict[int, torch.Tensor] = {}

    def remember(index):
        def hook(_module, args, kwargs):
            seen[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    hooks = [
        layer.register_forward_pre_hook(remember(index), with_kwargs=True)
        for index, layer in enumerate(target.model.layers)
    ]
    view = look(target, ids, (1, 2, 3))
    for hook in hooks:
        hook.remove()
    assert torch.equal(view.features, torch.cat([seen[1], seen[2], seen[3]], -1))
    final = look(target, ids, ()).features
    torch.testing.assert_close(target.lm_head(final), view.logits)


@pytest.fixture(scope="module")
def generated(target, stream):
    return generate_corpus(target, stream, 1, seed=0)


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_a_short_training_lowers_the_loss(kind, target, stream, generated):
    head = make_head(kind, target)
    assert generated.shape == (96, 256)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    batch = generated[:8]
    with torch.no_grad():
        first = head_loss(head, target, batch).item()
    train_head(head, target, stream, generated, steps=14, seed=0, peak_rate=2e-2)
    with torch.no_grad():
        assert head_loss(head, target, batch).item() < first - 0.25
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_frequent_ids_are_sorted_and_frequent(stream):
    generated = torch.full((2, 256), 399)
    ids = frequent_ids(generated, stream, 400, 64)
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert len(ids) == 64
    assert 399 in ids


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_saved_heads_come_back(kind, target, tmp_path: Path):
    head = make_head(kind, target)
    save_head(head, target.config, tmp_path)
    again = measure.load_head(tmp_path, kind, target.config)
    for name, value in head.state_dict().items():
        stored = value.to(torch.bfloat16).to(value.dtype) if value.is_floating_point() else value
        assert torch.equal(again.state_dict()[name], stored)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config.get("draft_vocab_size") == (133 if kind == EAGLE3 else None)
    assert torch.equal(draft_ids(again, 400), torch.arange(400) if kind == EAGLE else torch.arange(3, 400, 3))


def test_saved_target_comes_back(target, tmp_path: Path):
    save_target(target, tmp_path)
    again = load_target(tmp_path)
    for name, value in target.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(torch.bfloat16).float())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 10000.0
    assert config["torch_dtype"] == "bfloat16"


def test_acceptance_counts_prefixes_of_drafts(target, monkeypatch):
    """Drafts right, right, wrong: each round accepts two and adds the target's own token."""
    prompt = [BOS_ID, 50, 60]
    truth = generate_rows(target, torch.tensor([prompt]), 31, torch.zeros(1), seed=0)[0].tolist()
    assert EOS_ID not in truth

    def draft(_head, _target, ids, features, _count):
        assert list(ids) == truth[: len(ids)]
        assert features.shape[1] == len(ids) - 1
        known = len(ids)
        return [truth[known], truth[known + 1], -1]

    monkeypatch.setattr(measure, "draft", draft)
    result = measure.acceptance(make_head(EAGLE, target), target, [prompt], 31)
    assert result == measure.Acceptance(10, (10, 10, 0))
    assert result.rates == (1.0, 1.0, 0.0)
