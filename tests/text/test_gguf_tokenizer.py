"""Tokenizers of GGUF files: the ids of transformers, and what it loses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from baton.engine.loading.gguf_directory import gguf_directory  # noqa: E402
from baton.errors import CheckpointError  # noqa: E402
from baton.text import Tokenizer  # noqa: E402
from baton.text.gguf_tokenizer import end_tokens, gguf_tokenizer  # noqa: E402
from testkit.checkpoints.common import make_checkpoint  # noqa: E402
from testkit.checkpoints.gguf_files import OUTSIDE, byte_level, sentencepiece, write_gguf  # noqa: E402

TEXTS = [
    "",
    "The request's pages, and 12345 tokens; don't!",
    "  two spaces\n\n\tand tabs  ",
    "<think>a page</think><|turn|>the pages<|end|>",
    "Grüße, 你好 \N{GRINNING FACE} naïve",
    "x" * 40,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gguf")

    def write(architecture: str, vocabulary: Mapping[str, Any], **changes: Any) -> Path:
        size = len(vocabulary["tokenizer.ggml.tokens"])
        name = f"{architecture}-{len(list(folder.iterdir()))}"
        plain = make_checkpoint(folder / name, architecture, vocab_size=size, num_hidden_layers=1)
        return write_gguf(folder / f"{name}.gguf", plain, vocabulary=vocabulary, **changes)

    return write


@pytest.mark.parametrize(
    ("architecture", "vocabulary", "changes"),
    [
        ("llama", byte_level(), {}),
        ("llama", byte_level(), {"tokenizer.ggml.pre": "tekken", "tokenizer.ggml.add_bos_token": False}),
        ("qwen2", byte_level(), {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_eos_token": True}),
        ("llama", byte_level(), {"tokenizer.ggml.pre": "gpt-2"}),
        ("llama", sentencepiece(), {}),
        ("llama", sentencepiece(), {"tokenizer.ggml.add_eos_token": True}),
    ],
)
def test_ids_and_texts_are_those_of_transformers(
    architecture: str,
    vocabulary: dict[str, Any],
    changes: dict[str, Any],
    files: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = files(architecture, vocabulary, **changes)
    found = Tokenizer.load(gguf_directory(file, "model"))
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
    assert found.encode(TEXTS[1], add_special_tokens=False) == theirs.encode(TEXTS[1], add_special_tokens=False)


def test_a_special_token_outside_the_alphabet_keeps_its_id() -> None:
    """Templates of DeepSeek's distilled models write it. transformers 5.23 cuts it into bytes."""
    metadata = byte_level()
    backend, _ = gguf_tokenizer(metadata)
    number = metadata["tokenizer.ggml.tokens"].index(OUTSIDE)
    assert backend.encode(OUTSIDE, add_special_tokens=False).ids == [number]
    assert backend.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])


def test_llama_3_begins_with_bos_and_takes_words_whole() -> None:
    """As in its tokenizer.json."""
    metadata = {**byte_level(), "tokenizer.ggml.add_bos_token": None}
    del metadata["tokenizer.ggml.add_bos_token"]
    backend, _ = gguf_tokenizer(metadata)
    assert backend.encode("a").ids[0] == metadata["tokenizer.ggml.bos_token_id"]
    unreachable = {**metadata, "tokenizer.ggml.merges": metadata["tokenizer.ggml.merges"][:1]}
    word = metadata["tokenizer.ggml.tokens"][399]
    whole, _ = gguf_tokenizer(unreachable)
    text = word.replace("\u0120", " ")
    assert whole.encode(text, add_special_tokens=False).ids == [399]


def test_digits_stay_alone_for_smollm() -> None:
    backend, _ = gguf_tokenizer({**byte_level(), "tokenizer.ggml.pre": "smollm"})
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 123")] == ["a", "\u0120", "1", "2", "3"]


def test_turns_end_answers_too_and_templates_are_kept() -> None:
    metadata = byte_level()
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert end_tokens(metadata) == [eos, eos + 1]
    _, settings = gguf_tokenizer(metadata)
    assert settings["chat_template"] == metadata["tokenizer.chat_template"]
    several = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    _, settings = gguf_tokenizer({**metadata, **several})
    assert [entry["name"] for entry in settings["chat_template"]] == ["default", "tool_use"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5', expected one of gpt2, llama"),
        ({"tokenizer.ggml.pre": "chameleon"}, "tokenizer.ggml.pre is 'chameleon'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["no-such merge"]}, "tokenizer.ggml: "),
        ({"tokenizer.ggml.eos_token_id": 100000}, "tokenizer.ggml.eos_token_id is 100000"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml: "),
    ],
)
def test_unknown_gguf_tokenizers_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        gguf_tokenizer({**byte_level(), **change})
    assert words in str(caught.value)
