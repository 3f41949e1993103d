"""A checkpoint's sampling defaults, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.checkpoint_files import read_json
from baton.errors import CheckpointError, ConfigError, RequestError
from baton.sampling_params import SamplingDefaults, SamplingParams

# generation_config.json fields that vLLM uses, and the sampling parameters that they set.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(model: str, source: str, override: Mapping[str, Any] | None) -> SamplingDefaults:
    """`model`: a checkpoint directory. `source`: "auto" for the checkpoint's own file, "vllm" for none, or another
    directory. `override` has priority. As in vLLM, `max_new_tokens` from `override` or another directory also limits
    all requests.

    Raises `ConfigError`.
    """
    given: dict[str, Any] = {}
    if source != "vllm":
        given = _read(Path(model if source == "auto" else source), needed=source != "auto")
    limited = {**({} if source == "auto" else given), **(override or {})}.get("max_new_tokens")
    defaults = {
        GENERATION_FIELDS[name]: value
        for name, value in {**given, **(override or {})}.items()
        if name in GENERATION_FIELDS
    }
    defaults = {name: value for name, value in defaults.items() if value is not None}
    named = "override_generation_config" if override else "generation_config"
    try:
        taken = msgspec.convert({**defaults, "limit": limited}, SamplingDefaults)
        SamplingParams(**taken.given(), max_tokens=1 if taken.max_tokens is None else taken.max_tokens).check()
    except (msgspec.ValidationError, RequestError) as error:
        text = str(error).replace("max_tokens", "max_new_tokens")
        raise ConfigError(named, f"{text}; --generation-config vllm leaves the checkpoint's aside") from None
    return taken


def _read(directory: Path, needed: bool) -> dict[str, Any]:
    path = directory / "generation_config.json"
    if not path.is_file():
        if needed:
            raise ConfigError("generation_config", f"must be auto, vllm or a directory, and {path} is no file")
        return {}
    try:
        value = read_json(path)
    except CheckpointError as error:
        raise ConfigError("generation_config", str(error)) from None
    return {name: value.get(name) for name in GENERATION_FIELDS}
