"""The demo models' training text as tokens, also from a file, for a machine with another Python."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .corpus import load_corpus
from .target import TokenStream


def training_text(tokenizer: Path, kept: Path | None = None) -> TokenStream:
    """Plain text and chats in the tokens of `tokenizer`. `kept`: the file (.npz) to take them from, or to write."""
    if kept is not None and kept.exists():
        with np.load(kept) as arrays:
            return TokenStream.of(arrays["ids"], arrays["starts"])
    stream = TokenStream(load_corpus().train, Tokenizer.from_file(str(tokenizer)), chat=True)
    if kept is not None:
        np.savez_compressed(kept, ids=stream.ids.astype(np.uint16), starts=stream.starts.astype(np.int32))
    return stream
