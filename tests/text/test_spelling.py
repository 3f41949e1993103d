"""The bytes of single tokens, and characters that span prompt and output."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from baton.text import IncrementalDetokenizer, Tokenizer
from testkit.servers.fake_serving import EOS, write_tokenizer
from tests.text.test_text_layer import byte_fallback_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def mixed_tokenizer() -> Tokenizer:
    """GPT-2's alphabet with a decoder that does more: no text is just its tokens' bytes."""
    vocab = {token: number for number, token in enumerate(["a", "Ġb", "ï", "¿", "½", "Ã", "©", "##"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("##", "")])
    return Tokenizer(backend)


def said(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def test_a_whole_replacement_character_of_the_prompt_is_the_prompts(byte_level: Tokenizer, directory: Path) -> None:
    truth = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    for prompt, output in ((f"a{BROKEN}", "b"), (BROKEN * 7, "é"), (f"a{BROKEN}", BROKEN), (f"{BROKEN}x{BROKEN}", "")):
        ids, out = byte_level.encode(prompt), byte_level.encode(output)
        assert said(byte_level, out, ids) == output
        assert truth.decode([*ids, *out]) == truth.decode(ids) + output
    mixed = mixed_tokenizer()
    assert said(mixed, [0, 1], [0, 2, 3, 4]) == "a b"
    assert said(mixed, [6, 1], [0, 5]) == "é b"
    fallback = byte_fallback_tokenizer()
    whole = [7 + byte for byte in BROKEN.encode()]
    assert said(fallback, [3], [2, *whole]) == " dog"
    assert said(fallback, whole, [2, *whole]) == BROKEN


def test_a_character_that_the_prompt_begins_and_nothing_completes_is_the_prompts(byte_level: Tokenizer) -> None:
    begun = byte_level.encode("é")[:1]
    a = byte_level.encode("a")
    assert said(byte_level, [], begun) == ""
    assert said(byte_level, a, begun) == "a"
    assert said(byte_level, [EOS], begun) == ""
    assert said(byte_level, [*byte_level.encode("é")[1:], *a], begun) == "éa"
    # A character that the output begins itself, or completes, belongs to the output.
    assert said(byte_level, [*begun, *a], begun) == f"{BROKEN}a"
    assert said(byte_level, byte_level.encode("你")[1:2], byte_level.encode("你")[:1]) == BROKEN
    # The last byte of a whole U+FFFD.
    last = byte_level.encode(BROKEN)
    assert said(byte_level, [*last[2:], *a], last[:2]) == f"{BROKEN}a"


def test_any_prompt_and_output_are_what_they_decode_to_together(byte_level: Tokenizer) -> None:
    """The output is what the whole text adds to the prompt, if the prompt does not end in a partial character."""
    rng = random.Random(5)
    texts = ["a", "é", "你", "😀", BROKEN, " ", "\x00"]
    for tokenizer in (byte_level, byte_fallback_tokenizer()):
        for _ in range(300):
            prompt = tokenizer.encode("".join(rng.choices(texts, k=rng.randint(1, 9))))
            output = [rng.choice(tokenizer.encode(rng.choice(texts))) for _ in range(rng.randint(0, 12))]
            both, alone = tokenizer.decode([*prompt, *output]), tokenizer.decode(prompt)
            if tokenizer is byte_level:
                assert alone + said(tokenizer, output, prompt) == both
            else:
                whole = [tokenizer.encode(text) for text in rng.choices(texts, k=4)]
                flat = [token for ids in whole for token in ids]
                assert alone + said(tokenizer, flat, prompt) == tokenizer.decode([*prompt, *flat])


def test_the_bytes_of_tokens(byte_level: Tokenizer) -> None:
    text = "l'été 你好 😀"
    spelt = [byte_level.spelling.token_bytes(token) for token in byte_level.encode(text)]
    assert b"".join(spelt) == text.encode()
    assert byte_level.token_text(byte_level.encode("é")[0]) == "\\xc3"
    assert byte_level.spelling.token_bytes(EOS) == b"<eos>"
    assert byte_level.spelling.token_bytes(1 << 20) == b""
    fallback = byte_fallback_tokenizer()
    assert [fallback.token_text(token) for token in (2, 3, 4, 0)] == [" a", " dog", "s", "<unk>"]
    assert fallback.spelling.token_bytes(7 + 0xE4) == b"\xe4"
    assert mixed_tokenizer().token_text(1) == " b"


def test_bytes_are_what_a_decoder_makes_them(tmp_path: Path) -> None:
    """A vocabulary of GPT-2's alphabet may have a token that is spelt `<0x41>`."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<0x41>": 0, "a": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert said(tokenizer, [0, 1], []) == tokenizer.decode([0, 1]) == "<0x41>a"
    words = tokenizers.Tokenizer(models.WordPiece(vocab={"the": 0, "dog": 1, "##s": 2, "[UNK]": 3}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(words)
    assert [tokenizer.token_text(token) for token in (0, 1, 2)] == [" the", " dog", "s"]
    assert said(tokenizer, [1, 2], [0]) == " dogs"
