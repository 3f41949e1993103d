"""The model that all engines of a pool serve."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

from baton.comparison import differing_facts, facts_of, rounding_difference, token_facts, unequal_facts
from baton.errors import BatonError, ConfigError, EngineUnavailableError, IncompatiblePeerError
from baton.openai import ServedModel
from baton.router.pooled_engine import PooledEngine
from baton.router.workers.binding import SharedBinding, binding_key
from baton.text import Tokenizer
from baton.wire import EngineInfo

logger = logging.getLogger(__name__)


class PoolIdentity:
    """The first request binds the pool to the current model, until `clear` (docs/router.md, "Engines must agree")."""

    def __init__(
        self,
        engines: Callable[[], Sequence[PooledEngine]],
        tokenizer_dir: str | None,
        load_tokenizer: Callable[[str], Tokenizer],
        shared: SharedBinding | None = None,
    ) -> None:
        """`tokenizer_dir` None: the engines' checkpoint. `shared`: of the router's processes, if several."""
        self._engines, self._shared = engines, shared
        self._tokenizer_dir, self._load = tokenizer_dir, load_tokenizer
        self._model: ServedModel | None = None
        self._reference: EngineInfo | None = None  # the engine that `_model` was made from
        self._bound_length: int | None = None

    def clear(self) -> None:
        self._model = self._reference = self._bound_length = None
        if self._shared is not None:
            self._shared.clear()

    def model(self) -> ServedModel:
        """Raises `EngineUnavailableError`."""
        model = self._model
        if model is None:
            raise EngineUnavailableError("no engine has been reached yet")
        length, drafts = model.max_model_len, model.num_speculative_tokens
        named: dict[str, set[str]] = {}
        for engine in self._engines():
            if (info := engine.info) is not None:
                length = min(length, info.max_model_len)
                drafts = max(drafts, info.num_speculative_tokens)
                for name, adapter in info.adapters.items():
                    named.setdefault(name, set()).add(adapter)
        length = self._bound_length or length
        # A name of different files is ambiguous.
        adapters = {name: found.pop() for name, found in named.items() if len(found) == 1 and name != model.name}
        if (length, drafts, adapters) == (model.max_model_len, model.num_speculative_tokens, model.adapters):
            return model
        return dataclasses.replace(model, max_model_len=length, num_speculative_tokens=drafts, adapters=adapters)

    def bind(self) -> None:
        """Serve the present model until `clear`. Raises the errors of `model`, and `EngineUnavailableError` if another
        process of the router serves another model.
        """
        if self._bound_length is None:
            self._bound_length = self.model().max_model_len
        if self._shared is not None and self._reference is not None:
            key = binding_key(self._reference)
            self._shared.bind(key, self._bound_length)
            if self._shared.key != key:
                raise EngineUnavailableError("another process of this router serves another model")

    @property
    def bound(self) -> bool:
        return self._bound_length is not None

    async def adopt(self, engine: PooledEngine, info: EngineInfo) -> None:
        if self._reference is not None and self._is_alone(engine) and differing(self._reference, info):
            self._model = None
        while self._model is None:
            directory = self._tokenizer_dir or info.model_path
            try:
                loop = asyncio.get_running_loop()
                tokenizer = await loop.run_in_executor(None, self._load, directory)
            except BatonError as error:
                raise ConfigError("tokenizer", f"{error}; name its directory with --tokenizer") from None
            if self._model is None:
                self._model, self._reference = ServedModel.of(info, tokenizer), info
                if defaults := info.sampling_defaults.describe():
                    logger.info("requests of %s that do not say otherwise are sampled with %s", info.model, defaults)
        self.check(engine, info)  # another engine may have decided meanwhile

    def _is_alone(self, engine: PooledEngine) -> bool:
        others = (other for other in self._engines() if other is not engine and other.info is not None)
        return not self.bound and all(other.problem is not None for other in others)

    def check(self, engine: PooledEngine, info: EngineInfo) -> None:
        """Raises `IncompatiblePeerError` if the engine differs from the served model, or from an engine in use."""
        if self._shared is not None and self._shared.key not in (0, binding_key(info)):
            raise IncompatiblePeerError({"model": ("that of the router's other processes", info.model)})
        alive = [e.info for e in self._engines() if e is not engine and e.info is not None and e.problem is None]
        served = [] if self._reference is None or self._is_alone(engine) else [self._reference]
        for other in served + alive:
            different = differing(other, info)
            if different:
                raise IncompatiblePeerError(different)
        bound_length = self._bound_length or (0 if self._shared is None else self._shared.max_model_len)
        if info.max_model_len < bound_length:
            served_length = f"at least {bound_length}, which is served"
            raise IncompatiblePeerError({"max_model_len": (served_length, info.max_model_len)})

    def warn_of_rounding(self, engine: PooledEngine, info: EngineInfo) -> None:
        for other in self._engines():
            if other is engine or other.info is None:
                continue
            difference = rounding_difference(facts_of(other.info.fingerprint), facts_of(info.fingerprint))
            if difference is not None:
                logger.warning("engines %s and %s: %s", other.url, engine.url, difference)
                return


def differing(served: EngineInfo, info: EngineInfo) -> dict[str, tuple[object, object]]:
    """Names of facts that differ between engines that must give the same tokens."""
    names = ("model", "vocab_size", "default_seed", "num_speculative_tokens")
    pairs = {name: (getattr(served, name), getattr(info, name)) for name in names}
    different: dict[str, tuple[object, object]] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if served.fingerprint != info.fingerprint:
        facts = differing_facts(facts_of(served.fingerprint), facts_of(info.fingerprint))[0]
        if "drafter.num_speculative_tokens" not in facts:
            different.pop("num_speculative_tokens", None)
        different |= facts | unequal_facts(token_facts(served.fingerprint), token_facts(info.fingerprint))
    return different
