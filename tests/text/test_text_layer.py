"""Detokenisation never splits a character, stop strings are never shown early, templates run in a sandbox."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from baton.errors import CheckpointError, RequestError
from baton.text import IncrementalDetokenizer, StopChecker, Tokenizer
from baton.text.stop import _borders
from testkit.servers.fake_serving import EOS, write_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2: pieces that begin with a marked space, and bytes for everything else."""
    words = ["<unk>", "▁", "▁a", "▁dog", "s", "b", "▁你"]
    vocab = {word: i for i, word in enumerate(words)} | {f"<0x{b:02X}>": len(words) + b for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_join_to_the_text_and_split_no_character(byte_level: Tokenizer, text: str) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    ids = byte_level.encode(text)
    assume(byte_level.special_ids.isdisjoint(ids))  # hypothesis tries strings of the code, such as "<eos>"
    pieces = stream(byte_level, ids)
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert pieces[-1] == "", "a complete text leaves nothing to flush"


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_give_what_whole_decoding_gives(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids)


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(["a", " dog", " a", "é", "你好", "😀😀", "s"]), max_size=8))
def test_byte_fallback(parts: list[str]) -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode("".join(parts))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_byte_fallback_shows_a_character_when_it_is_complete() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [7 + byte for byte in "😀é".encode()]
    assert stream(tokenizer, ids) == ["", "", "", "😀", "", "é", ""]
    assert stream(tokenizer, [*ids[:2], 3]) == ["", "", "\N{REPLACEMENT CHARACTER} dog", ""]


def test_the_prompt_decides_how_the_first_token_is_spelt(byte_level: Tokenizer) -> None:
    tokenizer = byte_fallback_tokenizer()
    assert "".join(stream(tokenizer, [3])) == "dog"
    assert "".join(stream(tokenizer, [3], prompt=[2])) == " dog"
    bytes_of = [7 + byte for byte in "é".encode()]
    assert "".join(stream(tokenizer, bytes_of[1:], prompt=[2, bytes_of[0]])) == "é"
    ids = byte_level.encode("é")
    assert "".join(stream(byte_level, ids[1:], prompt=ids[:1])) == "é"


def test_special_tokens_are_hidden_unless_asked_for(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("ab"), EOS, *byte_level.encode("c")]
    assert "".join(stream(byte_level, ids)) == "abc"
    shown = IncrementalDetokenizer(byte_level, skip_special_tokens=False)
    assert "".join(shown.push(i) for i in ids) == "ab<eos>c"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_stop_strings_do_not_depend_on_where_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    checker = StopChecker(stops)
    shown = ""
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    consumed = 0
    for start, end in itertools.pairwise(edges):
        shown += checker.push(text[start:end])
        consumed = end
        if checker.matched is not None:
            break
    whole = text[:consumed]
    ends = [(at + len(stop), -len(stop)) for stop in stops if (at := whole.find(stop)) >= 0]
    if not ends:
        assert shown + checker.flush() == text
    else:
        end, minus = min(ends)  # the one that is complete first; of two the longer
        assert shown == text[: end + minus]
        assert checker.matched == text[end + minus : end]


def test_stop_strings_look_at_each_character_once() -> None:
    """Text that begins a stop string again and again: the worst case."""
    looks = 0

    class Counted(str):
        """A character that counts its comparisons."""

        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return str.__ne__(self, other)

        __hash__ = str.__hash__

    checker = StopChecker(["a" * 1000 + "b"])
    for _ in range(20_000):
        assert checker._advance(Counted("a")) is None
    assert looks < 5 * 20_000
    checker = StopChecker(["a" * 1000 + "b"])
    assert sum(len(checker.push("a")) for _ in range(5_000)) == 4_000
    assert len(checker.flush()) == 1_000


def test_stop_strings_of_other_requests_cost_nothing() -> None:
    """Each request's stop strings are analysed once, however many requests run concurrently."""
    checkers = [StopChecker([f"a{request}b{number}" for number in range(16)]) for request in range(20)]
    before = _borders.cache_info().misses
    for _ in range(3):
        for checker in checkers:
            checker.push("aac")
    assert _borders.cache_info().misses == before


def test_bytes_that_are_no_text_are_held_in_a_window(byte_level: Tokenizer) -> None:
    """Each token decodes the window: one that only grows makes the total cost quadratic."""
    detokenizer = IncrementalDetokenizer(byte_level)
    invalid = next(i for i in range(256) if byte_level.decode([i, i, i]) == "\N{REPLACEMENT CHARACTER}" * 3)
    text = "".join(detokenizer.push(invalid) for _ in range(5_000))
    assert len(detokenizer._window) <= 40
    assert text + detokenizer.flush() == "\N{REPLACEMENT CHARACTER}" * 5_000


def test_stop_string_can_be_included_and_held_off() -> None:
    checker = StopChecker(["end"], include_stop=True)
    assert checker.push("the e") == "the "
    assert checker.push("nd of it") == "end"
    assert checker.matched == "end"
    unarmed = StopChecker(["end"])
    assert unarmed.push("an end", armed=False) + unarmed.push(".") == "an end."
    assert unarmed.matched is None


def test_text_that_is_no_unicode_is_refused(byte_level: Tokenizer) -> None:
    """As of an argument of a command whose bytes are not UTF-8."""
    with pytest.raises(RequestError, match="prompt is not valid Unicode text"):
        byte_level.encode(b"a\xff".decode(errors="surrogateescape"))


def test_chat_template(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert byte_level.apply_chat_template(messages) == "<bos><user>hi\n<assistant>"
    assert byte_level.apply_chat_template(messages, False) == "<bos><user>hi\n"
    with pytest.raises(RequestError, match="no tools here"):
        byte_level.apply_chat_template([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("expression", ["tools | dictsort", "messages.append(1)", "tools[0].x.y", "1 // 0"])
def test_whatever_a_template_raises_is_a_refusal(tmp_path: Path, expression: str) -> None:
    """Messages and tools may have shapes that the template's filters do not expect."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path), chat_template=f"{{{{ {expression} }}}}")
    with pytest.raises(RequestError, match="the chat template refuses the messages") as refused:
        tokenizer.apply_chat_template([], tools=[{}])
    assert refused.value.param == "messages"


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        Tokenizer.load(directory).apply_chat_template([])
    (directory / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="does not compile"):
        Tokenizer.load(directory)


def test_a_directory_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "model").rename(tmp_path / os.fsdecode(b"caf\xe9"))
    assert Tokenizer.load(directory).eos_token_ids == (EOS,)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("tokenizer_config.json", "/proc/self/mem", "cannot be read: Input/output error"),
        ("chat_template.jinja", "/proc/self/mem", "cannot be read: Input/output error"),
        ("chat_template.jinja", None, "not UTF-8: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, target: str | None, message: str) -> None:
    file = write_tokenizer(tmp_path) / name
    file.unlink(missing_ok=True)
    if target is None:
        file.write_bytes("é".encode("latin-1"))
    else:
        file.symlink_to(target)
    with pytest.raises(CheckpointError, match=f"{name}: {message}"):
        Tokenizer.load(tmp_path)


def test_missing_and_broken_tokenizer_files_are_named(tmp_path: Path, byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_ids == (EOS,)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    directory = write_tokenizer(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Tokenizer.load(directory).eos_token_ids == (1, 2, EOS)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer.load(directory)
    (directory / "tokenizer_config.json").unlink()
    write_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.load(directory).apply_chat_template([])
