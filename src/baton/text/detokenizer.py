"""Token ids to text, one token at a time, without splitting a character.

A character may span tokens, and some vocabularies drop the leading space of a text. Byte tokens go through a UTF-8
decoder. For others, each step decodes a short window and emits the new text. Byte-fallback vocabularies need both: an
incomplete last character changes how a run of bytes decodes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from baton.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW_TOKENS = 32
_CONTEXT_TOKENS = 6  # the window starts before any character that the prompt left incomplete


class IncrementalDetokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spelt: frozenset[int] = frozenset(),
    ) -> None:
        """`prompt_ids` decides how the first token is decoded; the output may complete its last character. `spelt`:
        special tokens to emit even with `skip_special_tokens`."""
        self._tokenizer = tokenizer
        self._spelling = tokenizer.spelling
        self._hidden = tokenizer.special_ids - spelt if skip_special_tokens else frozenset[int]()
        self._utf8 = _UTF8("replace")
        self._in_bytes = False
        context = [i for i in prompt_ids[-4 * _CONTEXT_TOKENS :] if i not in self._hidden]
        self._window = context[-_CONTEXT_TOKENS:]
        last: list[bytes] = []
        for token_id in reversed(self._window):
            raw = self._spelling.raw(token_id)
            if raw is None:
                break
            self._in_bytes = True
            last.append(raw)
            if raw and raw.isascii():
                break
        self._utf8.decode(b"".join(reversed(last)))
        # Bytes of a character that the output may complete.
        self._begun = bytes(self._utf8.getstate()[0])
        self._is_open = bool(self._begun)  # within a character
        self._num_emitted = len(self._complete(self._text())) if self._window and not self._in_bytes else 0

    def push(self, token_id: int) -> str:
        """The text that is now complete."""
        if token_id in self._hidden:
            return ""
        raw = self._spelling.raw(token_id)
        if raw is not None:
            self._in_bytes = True
            if not self._spelling.in_bytes:
                self._window = [*self._window[-_MAX_WINDOW_TOKENS:], token_id]
            if not self._is_open and raw.isascii():
                return raw.decode()
            text = self._without_prompt_rest(self._utf8.decode(raw), raw)
            self._is_open = bool(self._utf8.getstate()[0])
            return text
        out = self._leave_bytes()
        self._window.append(token_id)
        text = self._text()
        ready = self._complete(text)
        if len(ready) > self._num_emitted:
            out += ready[self._num_emitted :]
            self._num_emitted = len(ready)
        if len(ready) == len(text) and ready:
            # The last token is enough context.
            self._window = [token_id]
            self._num_emitted = len(self._text())
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            # An incomplete character has at most four tokens.
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._num_emitted = len(self._complete(self._text()))
        return out

    def flush(self) -> str:
        """The held text, at the end. An incomplete character becomes U+FFFD."""
        out = self._leave_bytes()
        if self._spelling.in_bytes or not self._window:
            return out
        text = self._text()
        out += text[self._num_emitted :]
        self._num_emitted = len(text)
        return out

    def _leave_bytes(self) -> str:
        if not self._in_bytes:
            return ""
        self._in_bytes = False
        out = self._without_prompt_rest(self._utf8.decode(b"", final=True), b"")
        self._utf8.reset()
        self._is_open = False
        if not self._spelling.in_bytes:
            self._num_emitted = len(self._text())
        return out

    def _without_prompt_rest(self, text: str, raw: bytes) -> str:
        """`text` without the U+FFFD of a character of the prompt that the output did not continue. `raw`: the bytes
        that were added."""
        begun, self._begun = self._begun, b""
        broken = begun and text.startswith(_REPLACEMENT) and not (begun + raw).startswith(_REPLACEMENT.encode())
        return text[1:] if broken else text

    def _complete(self, text: str) -> str:
        """`text` without an incomplete last character (decoded as one U+FFFD)."""
        if not self._spelling.mixed or not text.endswith(_REPLACEMENT):
            return text
        decoder = _UTF8("replace")
        decoder.decode(b"".join(map(self._spelling.token_bytes, self._window)))
        return text[:-1] if decoder.getstate()[0] else text

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
