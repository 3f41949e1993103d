"""Token ids to text, one token at a time, never splitting a character.

Decoding each token alone is wrong twice over: a character may span tokens, and some vocabularies drop a
leading space from whatever comes first. So each step decodes a short window of tokens and emits what grew,
holding back a trailing incomplete character. Byte-fallback tokens go through a UTF-8 decoder of their own,
because such a vocabulary decodes a whole run of bytes differently when its last character is incomplete.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from baton.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW_TOKENS = 32
_CONTEXT_TOKENS = 6  # enough that the window starts before any character that the prompt left open


class IncrementalDetokenizer:
    """The text of one growing sequence."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        """`prompt_ids` is context: its text is never emitted, but decides how the first token is spelt."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_bytes = False
        context = [i for i in prompt_ids[-4 * _CONTEXT_TOKENS :] if not self._hidden(i)]
        self._window = context[-_CONTEXT_TOKENS:]
        self._num_emitted = len(_complete(self._text())) if self._window else 0
        for token_id in self._window:  # the prompt may end within a character spelt in byte tokens
            byte = tokenizer.byte_values.get(token_id)
            self._in_bytes = byte is not None
            if byte is None:
                self._utf8.reset()
            else:
                self._utf8.decode(bytes([byte]))

    def push(self, token_id: int) -> str:
        """Add one token and return the text that is complete now, perhaps empty."""
        byte = self._tokenizer.byte_values.get(token_id)
        if byte is not None:
            self._window.append(token_id)
            self._in_bytes = True
            return self._utf8.decode(bytes([byte]))
        if self._hidden(token_id):
            return ""
        out = self._leave_bytes()
        self._window.append(token_id)
        text = self._text()
        ready = _complete(text)
        if len(ready) > self._num_emitted:
            out += ready[self._num_emitted :]
            self._num_emitted = len(ready)
        if len(ready) == len(text) and ready:
            # Nothing is pending, so the last token alone is context enough for the next.
            self._window = [token_id]
            self._num_emitted = len(self._text())
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            # Bytes that never become characters: what is still open lies in the last four tokens at most.
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._num_emitted = len(_complete(self._text()))
        return out

    def flush(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD. For the end of the sequence."""
        out = self._leave_bytes()
        text = self._text() if self._window else ""
        out += text[self._num_emitted :]
        self._num_emitted = len(text)
        return out

    def _leave_bytes(self) -> str:
        """End a run of byte tokens; its text was emitted by the UTF-8 decoder, so count it as emitted."""
        if not self._in_bytes:
            return ""
        self._in_bytes = False
        out = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._num_emitted = len(self._text())
        return out

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def _hidden(self, token_id: int) -> bool:
        return self._skip and token_id in self._tokenizer.special_ids


def _complete(text: str) -> str:
    """Return `text` without a trailing character whose bytes have not all come (decoded as one U+FFFD)."""
    return text[:-1] if text.endswith(_REPLACEMENT) else text
