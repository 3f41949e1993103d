from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from baton.drafters.methods import DRAFTERS, WITHOUT_MODEL
from baton.errors import ConfigError
from baton.setting import json_object, refuse_unknown

Verifier = Literal["coupled", "rejection"]
DraftKV = Literal["require", "prefer", "drop"]
AUTO = "auto"
MOST_AUTO_DRAFTS = 8
# Fields for a single method.
_OPTIONS = {"ngram": ("prompt_lookup_min", "prompt_lookup_max")}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`--speculative-config`. With `num_speculative_tokens` "auto", the engine chooses it for every request and step.
    docs/drafters.md explains each field.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int | Literal["auto"] = 3
    verifier: Verifier = "coupled"
    revision: str | None = None
    draft_kv: DraftKV = "require"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_tensor_parallel_size: int | None = None

    @classmethod
    def parse(cls, value: str | dict[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """Raises `ConfigError` naming the key."""
        if isinstance(value, SpeculativeConfig):
            return value
        data = json_object("speculative_config", value)
        if data is None:
            return None
        refuse_unknown("speculative_config", data, {f.name for f in fields(cls)})
        without = data.get("method") in WITHOUT_MODEL
        if isinstance(data.get("method"), str) and data["method"] not in DRAFTERS:
            known = ", ".join(DRAFTERS)
            raise ConfigError("speculative_config.method", f"must be one of {known}, got {data['method']!r}")
        for key in ("method",) if without else ("method", "model"):
            if not isinstance(data.get(key), str) or not data[key]:
                raise ConfigError(f"speculative_config.{key}", "is required and must be a string")
        for key in ("model", "revision"):
            if without and data.get(key) is not None:
                raise ConfigError(f"speculative_config.{key}", f"is not for method {data['method']}")
        if not isinstance(data.get("revision"), str | None):
            raise ConfigError("speculative_config.revision", "must be a string")
        if data.get("num_speculative_tokens") != AUTO:
            _check_int("num_speculative_tokens", data.get("num_speculative_tokens", 3), 0, 32)
        elif data.get("verifier", "coupled") != "coupled":
            # With another verifier, measured times would decide tokens.
            raise ConfigError("speculative_config.num_speculative_tokens", f"is {AUTO} with the coupled verifier alone")
        if data.get("draft_tensor_parallel_size") not in (None, 1):
            what = "must be 1: the drafter is whole on every tensor rank"
            raise ConfigError("speculative_config.draft_tensor_parallel_size", what)
        verifier, draft_kv = data.get("verifier", "coupled"), data.get("draft_kv", "require")
        if verifier not in get_args(Verifier):
            raise ConfigError("speculative_config.verifier", f"must be coupled or rejection, got {verifier!r}")
        if draft_kv not in get_args(DraftKV):
            raise ConfigError("speculative_config.draft_kv", f"must be require, prefer or drop, got {draft_kv!r}")
        for method, names in _OPTIONS.items():
            for name in names:
                if data.get(name) is None:
                    continue
                if data["method"] != method:
                    raise ConfigError(f"speculative_config.{name}", f"is for method {method}, not {data['method']}")
                _check_int(name, data[name], 1, 1 << 20)
        return cls(**data)

    @property
    def max_drafts(self) -> int:
        return MOST_AUTO_DRAFTS if self.num_speculative_tokens == "auto" else self.num_speculative_tokens

    @property
    def drafts_alike(self) -> bool:
        return self.draft_kv == "require" and self.num_speculative_tokens != AUTO

    @property
    def options(self) -> dict[str, int]:
        given = {name: getattr(self, name) for name in _OPTIONS.get(self.method, ())}
        return {name: value for name, value in given.items() if value is not None}


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"speculative_config.{name}", f"must be {least} to {most}, got {value!r}")
