"""Makes an engine's `Request` from a `GenerateRequest`, with all checks that need the model."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import msgspec

from baton.comparison import token_identity
from baton.engine.request import Request
from baton.engine.sampling.bad_words import BadWords
from baton.engine.sampling.sampling_state import SamplingState
from baton.errors import (
    ForbiddenError,
    ForeignTicketError,
    IncompatiblePeerError,
    ProtocolError,
    RequestError,
    WrongEngineError,
)
from baton.handoff.protocol.ticket import SignedTicket, prefix_digest, request_digest
from baton.log_limit import LogLimit
from baton.sampling_params import MIN_TEMPERATURE, seed_word
from baton.structured import Matcher
from baton.structured.source import PARAM
from baton.text.word_tokens import word_tokens
from baton.wire import EngineInfo, GenerateRequest, LegRole

if TYPE_CHECKING:
    from baton.engine.build import Engine

log = logging.getLogger(__name__)
log.addFilter(LogLimit())


def make_request(engine: Engine, wire: GenerateRequest) -> Request:
    """Raises `RequestError`, `ForbiddenError` or `ForeignTicketError` for an invalid ticket,
    `WrongEngineError` for another engine's, and `IncompatiblePeerError` as `check_identity`.
    """
    info = engine.info
    params = wire.sampling_params.check(info.vocab_size)
    check_identity(wire, info)
    prompt = wire.prompt_token_ids
    if not prompt:
        raise RequestError("prompt must have at least one token", "prompt")
    if not 0 <= min(prompt) <= max(prompt) < info.vocab_size:
        raise RequestError(f"prompt token ids must be between 0 and {info.vocab_size - 1}", "prompt")
    if len(prompt) >= info.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the maximum model length is {info.max_model_len} "
            "including at least one output token",
            "prompt",
        )
    num_prompt = len(prompt) if wire.num_prompt_tokens is None else wire.num_prompt_tokens
    if not 1 <= num_prompt <= len(prompt):
        raise RequestError("num_prompt_tokens must be between 1 and the number of tokens", "num_prompt_tokens")
    if params.max_tokens and len(prompt) - num_prompt >= params.max_tokens:
        raise RequestError("the known tokens leave nothing to generate", "num_prompt_tokens")
    ticket: SignedTicket | None = None
    if wire.handoff is not None:
        prefix_len = wire.handoff.prefix_len
        if prefix_len is not None and (wire.handoff.role == "alone" or prefix_len >= len(prompt)):
            raise RequestError("prefix_len must be less than the prompt's length, for two engines", "handoff")
        ticket = _ticket(engine, wire)
        if wire.handoff.role == "alone":
            wire, ticket = msgspec.structs.replace(wire, handoff=None), None
    if params.prompt_logprobs is not None and ticket is not None:
        raise RequestError("a prompt is scored on one engine, without a handoff", "prompt_logprobs")
    if params.normalised() is not params:
        log.warning("%s: temperature %g counts as %g", wire.request_id, params.temperature, MIN_TEMPERATURE)
        params = params.normalised()
    if (seed := seed_word(params.seed)) is None:
        if ticket is not None and params.temperature > 0.0:
            raise RequestError("a handoff needs one seed for both legs", "seed")
        seed = secrets.randbits(63) if info.default_seed is None else info.default_seed
    if seed != params.seed:
        params = msgspec.structs.replace(params, seed=seed)
    wire = msgspec.structs.replace(wire, sampling_params=params)
    barred = BadWords(word_tokens(params.bad_words, engine.tokenizer, info.vocab_size))
    sampler = SamplingState(params, prompt[:num_prompt], info.vocab_size, info.eos_token_ids, barred)
    sampler.advance(prompt[num_prompt:])
    return Request(wire, sampler, ticket, _matcher(engine, wire, prompt[num_prompt:]))


def check_identity(wire: GenerateRequest, info: EngineInfo) -> None:
    """Raises `RequestError` for an adapter, and `IncompatiblePeerError` if this engine, perhaps restarted at the same
    URL, would give other tokens or an earlier end than the router planned for.
    """
    if wire.adapter is not None:
        raise RequestError("this engine has no LoRA adapters", "adapter")
    if wire.identity is None:
        return
    own = token_identity(info.fingerprint)
    if wire.identity != own:
        raise IncompatiblePeerError({"identity": (own, wire.identity)})
    num_prompt = len(wire.prompt_token_ids) if wire.num_prompt_tokens is None else wire.num_prompt_tokens
    needed = num_prompt + wire.sampling_params.max_tokens
    if needed > info.max_model_len:
        raise IncompatiblePeerError({"max_model_len": (info.max_model_len, f"at least {needed}")})


def _matcher(engine: Engine, wire: GenerateRequest, known: list[int]) -> Matcher | None:
    constraint = wire.sampling_params.structured_outputs
    if constraint is None:
        return None
    if engine.grammars is None:
        raise RequestError("the output follows no grammar here: the engine has no tokenizer or no end token", PARAM)
    engine.grammars.check(constraint)
    matcher = engine.grammars.matcher(constraint)
    matcher.advance(known)
    return matcher


def _ticket(engine: Engine, wire: GenerateRequest) -> SignedTicket:
    assert wire.handoff is not None
    if engine.redeemer is None:
        raise RequestError("this engine takes no part in handoffs: it has no ticket key", "handoff")
    if wire.handoff.prefix_len is not None:
        digest = prefix_digest(wire.prompt_token_ids, wire.cache_salt)
    else:
        digest = request_digest(wire.prompt_token_ids, wire.sampling_params, wire.num_prompt_tokens)
    alone = wire.handoff.role == "alone"
    role: LegRole = "prefill" if wire.handoff.role == "prefill" else "decode"
    try:
        ticket = engine.redeemer.redeem(wire.handoff.ticket, role, digest, engine.core.clock.monotonic())
        if (ticket.prefill_incarnation == ticket.decode_incarnation) is not alone:
            raise ProtocolError("the ticket is for one engine alone, or for two")
        return ticket
    except ProtocolError as error:
        log.warning("refused the ticket of a request: %s", error)
        if isinstance(error, WrongEngineError | ForeignTicketError):
            # The router may not know of a restart yet.
            raise
        raise ForbiddenError(str(error), "handoff") from None
