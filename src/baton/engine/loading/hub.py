"""Where a checkpoint is: a directory, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from baton.engine.loading.gguf_directory import gguf_directory, lone_gguf
from baton.errors import ConfigError

# Weights in other formats are not downloaded.
_FILES = ["*.json", "*.safetensors", "*.jinja"]
_LEFT_OUT = ["original/*", "consolidated*", "onnx/*", "*/*.safetensors"]
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def checkpoint_directory(model: str, revision: str | None = None, field: str = "model") -> str:
    """`model` itself if it is a directory, else the directory of `ORG/NAME` in the hub's cache, downloaded if needed.
    For a GGUF file, or a directory with nothing else, the directory made for it.

    `revision`: a branch, tag or commit. Raises `ConfigError` for `field`, and `CheckpointError` for a GGUF file that
    cannot be served.
    """
    is_directory = os.path.isdir(model)
    if is_directory or model.endswith(".gguf"):
        if revision is not None:
            what = "directory" if is_directory else "file"
            raise ConfigError("revision", f"is for a model of the hub, and {model} is a {what}")
        file = lone_gguf(Path(model)) if is_directory else Path(model)
        return model if file is None else gguf_directory(file, field)
    if _NAME.fullmatch(model) is None:
        raise ConfigError(field, f"must be a directory in Hugging Face format or ORG/NAME on the hub, got {model!r}")
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return str(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_FILES, ignore_patterns=_LEFT_OUT
            )
        )
    except Exception as error:  # of several libraries
        why = str(error).partition("\n")[0] or type(error).__name__
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(field, f"{model}{at} is no directory here, and the hub does not give it: {why}") from None
