"""The bytes of single tokens: a part of a character has no text."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
# Decoders that change no bytes.
_PLAIN = {"ByteLevel", "Fuse"}
_MAX_TRIES = 1000


class Spelling:
    """Texts of tokens, as a vocabulary's decoder writes them within a text. Thread-safe.

    `in_bytes`: all tokens are bytes (GPT-2's alphabet), and a text is their concatenation as UTF-8. `mixed`: the same,
    but the decoder also changes the text. `byte_values`: the bytes of tokens `<0x00>` to `<0xFF>`, if the decoder has
    byte fallback (Llama 2, Gemma).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self.in_bytes = "ByteLevel" in kinds and kinds <= _PLAIN
        self.mixed = "ByteLevel" in kinds and not self.in_bytes
        self.byte_values: dict[int, int] = {}
        if "ByteFallback" in kinds:
            for token, number in backend.get_vocab(with_added_tokens=False).items():
                if (match := _BYTE_TOKEN.match(token)) is not None:
                    self.byte_values[number] = int(match.group(1), 16)
        self._known: dict[int, bytes] = {}
        self._anchor = None if self.in_bytes or self.mixed else self._find_anchor()

    def raw(self, token_id: int) -> bytes | None:
        """The bytes of a token that may be a part of a character; None for a token that is text."""
        if self.in_bytes:
            raw = self._known.get(token_id)
            return self.token_bytes(token_id) if raw is None else raw
        value = self.byte_values.get(token_id)
        return None if value is None else bytes([value])

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text before it; empty for an unknown id."""
        raw = self._known.get(token_id)
        if raw is None:
            raw = self._known[token_id] = self._spell(token_id)
        return raw

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.byte_values:
            return bytes([self.byte_values[token_id]])
        if self.in_bytes or self.mixed:
            # A token with any character outside the alphabet is plain text, as in the decoder.
            known = [ALPHABET.get(character) for character in token]
            return token.encode() if None in known else bytes(value for value in known if value is not None)
        if self._anchor is None:
            return self._text(token_id).encode()
        before = self._text(self._anchor)
        text = self._text(self._anchor, token_id)
        # Some vocabularies drop a leading space, others put spaces between words.
        return (text[len(before) :] if text.startswith(before) else self._text(token_id)).encode()

    def _find_anchor(self) -> int | None:
        """A token whose text stays the same when another token follows."""
        for number in range(min(self._backend.get_vocab_size(), _MAX_TRIES)):
            text = self._text(number)
            if text and "\N{REPLACEMENT CHARACTER}" not in text and self._text(number, number).startswith(text):
                return number
        return None

    def _text(self, *token_ids: int) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))


def escaped_text(spelt: bytes) -> str:
    """Bytes as text; invalid UTF-8 as in OpenAI's API: `\\xe2\\x82`."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{value:02x}" for value in spelt)


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    decoder = backend.decoder
    if decoder is None:
        return set()
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    stages: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return {stage["type"] for stage in stages}


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes map to themselves, the others to U+0100 and up."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in own]
    return {chr(value): value for value in own} | {chr(0x100 + n): value for n, value in enumerate(others)}


ALPHABET = _alphabet()
