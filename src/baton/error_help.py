"""Cause and cure of every error that a client or an operator can meet, by its stable code."""

from __future__ import annotations

from dataclasses import dataclass

from baton import errors


@dataclass(frozen=True, slots=True)
class ErrorHelp:
    """One line each. `where`: the HTTP status, or how else the code is seen."""

    where: str
    cause: str
    cure: str


OTHER_TICKET_KEY = "other_ticket_key"
# Subclasses have their own codes; a `HandoffError` has its reason.
CODE_BY_ERROR: dict[type[errors.BatonError], str] = {
    errors.BatonError: "engine_error",
    errors.ConfigError: "config",
    errors.CheckpointError: "checkpoint",
    errors.RequestError: "invalid_request",
    errors.UnknownModelError: "model_not_found",
    errors.UnauthorizedError: "invalid_admin_token",
    errors.InvalidApiKeyError: "invalid_api_key",
    errors.ForbiddenError: "forbidden",
    errors.OverloadedError: "overloaded",
    errors.EngineUnavailableError: "engine_unavailable",
    errors.EngineLostError: "engine_unavailable",
    errors.EngineStalledError: "engine_stalled",
    errors.LegRefusedError: "refused",
    errors.DrainingError: "draining",
    errors.ShortageError: "engine_unavailable",
    errors.CapacityError: "capacity",
    errors.NonFiniteLogitsError: "nonfinite_logits",
    errors.ProtocolError: "protocol_error",
    errors.ForeignTicketError: OTHER_TICKET_KEY,
    errors.IncompatiblePeerError: "incompatible_peer",
    errors.TicketExpiredError: "ticket_expired",
    errors.UndefinedTransitionError: "undefined_transition",
    errors.WrongEngineError: "wrong_engine",
    errors.HandoffError: "handoff_failed",
    errors.TransportError: "transfer_failed",
}
# Refusals that HTTP itself makes, by status.
CODE_BY_STATUS: dict[int, str] = {
    400: "malformed_http",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
    503: "too_many_dashboards",
}

_HANDOFF = "handoff"
_START = "start, exit status 2"


def _handoff(cause: str, cure: str) -> ErrorHelp:
    return ErrorHelp(_HANDOFF, cause, cure)


HELP: dict[str, ErrorHelp] = {
    "invalid_request": ErrorHelp("400", "a field of the request is wrong; `param` names it", "correct the field"),
    "malformed_http": ErrorHelp("400", "the bytes are not HTTP/1.1", "check the client and proxies between"),
    "capacity": ErrorHelp(
        "400", "the request can never fit into the KV cache", "raise `--kv-cache-memory`, or shorten it"
    ),
    "invalid_api_key": ErrorHelp("401", "no valid API key came", "send `Authorization: Bearer KEY`"),
    "invalid_admin_token": ErrorHelp("401", "no valid admin token came", "send the token of `--admin-token-file`"),
    "forbidden": ErrorHelp(
        "403",
        "administration is off, a foreign web page asked, or a leg has no valid ticket",
        "start the router with `--admin-token-file`; read the engine's log",
    ),
    OTHER_TICKET_KEY: ErrorHelp(
        "403", "a leg's ticket is signed with another key", "give router and engines the same ticket key"
    ),
    "model_not_found": ErrorHelp("404", "no such model is served", "take a name from `/v1/models`"),
    "not_found": ErrorHelp("404", "no such path, or no recent request with this id", "see `/docs` for the paths"),
    "method_not_allowed": ErrorHelp("405", "the path has other methods", "see `/docs` for the methods"),
    "request_timeout": ErrorHelp("408", "head or body came too slowly", "check the client's network"),
    "request_too_large": ErrorHelp("413", "the body is larger than the limit", "send less at once"),
    "unsupported_media_type": ErrorHelp("415", "the content type is wrong", "send `Content-Type: application/json`"),
    "expectation_failed": ErrorHelp(
        "417", "`Expect` asks for what is not known", "send `100-continue`, or no `Expect`"
    ),
    "overloaded": ErrorHelp("429", "too many requests wait", "try again after `Retry-After`; add engines"),
    "too_many_dashboards": ErrorHelp("503", "too many dashboards are open", "close some pages"),
    "engine_unavailable": ErrorHelp("503", "no engine can take the request now", "look at `problem` in `/status`"),
    "engine_stalled": ErrorHelp("503", "an engine's step does not end", "kill its process; `baton up` starts it again"),
    "draining": ErrorHelp("503", "the server is about to end", "send the request to another server, or later"),
    "protocol_error": ErrorHelp("409", "a message breaks the protocol", "run the same version on all sides"),
    "undefined_transition": ErrorHelp(
        "409", "an event came that the protocol does not expect", "report it with the log"
    ),
    "wrong_engine": ErrorHelp(
        "409", "a ticket names another engine or an earlier start of it", "send the request again"
    ),
    "engine_error": ErrorHelp("500", "an engine failed in a way with no name", "read the engine's log; report it"),
    "internal_error": ErrorHelp("500", "a defect in the server", "read its log; report it"),
    "config": ErrorHelp(_START, "a setting is unknown or out of range; the line names it", "correct the setting"),
    "checkpoint": ErrorHelp(_START, "a checkpoint's file is missing, cut off or of another model", "fetch it again"),
    # Handoffs and legs: reasons in logs, in `baton:router_handoff_failures`, and of a request that did not recover.
    "aborted": _handoff("the other side gave its leg up", "nothing, if the client left"),
    "agent_lost": _handoff("an engine's handoff thread ended", "read the engine's log; its process is started again"),
    "bad_seeds": _handoff(
        "first token, drafts or drafter states are out of range", "check that P and D run one version"
    ),
    "cancelled": _handoff("the attempt was cancelled before its commit", "nothing, if the client left"),
    "engine_closed": _handoff("an engine ended in order", "nothing; requests continue elsewhere"),
    "engine_lost": _handoff("an engine's connection broke or its lease expired", "read the engine's log"),
    "failed": _handoff("the other engine ended the request for a reason it does not tell", "read that engine's log"),
    "forgotten": _handoff("P no longer knows the attempt", "nothing, if the client left; else look for restarts"),
    "handoff_failed": _handoff("a handoff ended without commit", "look at the failures by reason"),
    "handoff_timeout": _handoff("no commit within `handoff_timeout_s`", "raise it, or find out what is slow"),
    "incompatible_peer": ErrorHelp(
        "409, handoff", "two engines differ; the text names the fields", "run `baton doctor`"
    ),
    "incomplete_commit": _handoff("COMMIT does not cover what D wanted", "run one version on P and D; report it"),
    "integrity_failed": _handoff("bytes stayed damaged after repairs", "check the link and the memory of both hosts"),
    "lease_expired": _handoff("a peer was silent for a lease", "check the network and pauses of that process"),
    "message_too_large": _handoff("a message of the handoff exceeds its limit", "shorten prompts, or raise page sizes"),
    "no_prefix_cache": _handoff("a vLLM server has no prefix cache, or a model with states", "nothing: it is computed"),
    "no_such_role": _handoff("a vLLM server takes no legs of that role", "start it with `kv_role` `kv_both`"),
    "no_room": _handoff("no pages came free", "raise `--kv-cache-memory`, or add engines"),
    "nonfinite_logits": ErrorHelp("500, handoff", "logits are NaN or infinite", "check weights, dtype and memory"),
    "not_answering": _handoff("the handoff thread does not answer", "restart the engine; report it"),
    "not_final": _handoff("D wants tokens after the prompt's end", "run one version on P and D; report it"),
    "not_received": _handoff(
        "a vLLM server got less of what another has cached than was sent", "read its log: it is computed"
    ),
    "other_blocks": _handoff(
        "vLLM servers with windows have blocks of other sizes", "set an equal `--block-size`, or it is computed"
    ),
    "peer_lost": _handoff("the other engine left or was replaced", "nothing, if it was restarted on purpose"),
    "preempted": _handoff("P's pages went to other requests", "give P more KV memory"),
    "prefix_missing": _handoff(
        "an engine holds less of a prompt than the router thought", "nothing: it is handed off, or computed"
    ),
    "prefix_refused": _handoff(
        "an engine takes no prefix of another's cache: no room, or no checkpoint there", "nothing: it is computed"
    ),
    "queue_timeout": ErrorHelp("503, handoff", "no room within `queue_timeout_s`", "add engines, or raise the limit"),
    "refused": ErrorHelp("503, handoff", "the engine refused the leg", "read the engine's log"),
    "register_refused": _handoff("D's registration is not allowed for this attempt", "check clocks, keys and versions"),
    "shutdown": ErrorHelp("503, handoff", "the engine ended with the request running", "send the request again"),
    "step_failed": _handoff("one request made a step fail", "read the engine's log; report the request"),
    "superseded": _handoff("a later attempt of the request has begun", "nothing"),
    "ticket_expired": ErrorHelp(
        "409, handoff", "a leg came after its ticket's life", "raise `--ticket-life`; look for pauses"
    ),
    "token_mismatch": ErrorHelp(
        "500, handoff",
        "two engines chose different tokens at one position",
        "run `baton doctor`, then `baton verify`: their numerics or weights differ",
    ),
    "too_short": _handoff("what is cached has too few whole blocks of the other engine", "nothing: it is computed"),
    "transfer_failed": _handoff(
        "the transport could not copy", "check the transport's log, `/dev/shm` and the network"
    ),
    "unhealthy_peer": _handoff("the peer sent damaged bytes before", "check its link and memory, then restart it"),
    "unknown": _handoff("a peer gave no reason", "read its log"),
    "unreachable_peer": _handoff("P's control address does not answer", "check `control_bind`, ports and firewalls"),
}


def code_of(error: errors.BatonError) -> str:
    """The reason of a failed handoff, otherwise the code of the error's class."""
    if isinstance(error, errors.HandoffError):
        return error.reason
    return next(CODE_BY_ERROR[kind] for kind in type(error).__mro__ if kind in CODE_BY_ERROR)
