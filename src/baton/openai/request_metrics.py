"""vLLM's `metrics` object of a response: times and speculative decoding of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baton.openai.output import ChoiceOutput
from baton.openai.plan import Plan

SpecDecodeLevel = Literal["none", "summary", "detailed"]


@dataclass(frozen=True, slots=True)
class PerRequestMetrics:
    """The content of `metrics`, by vLLM's flags; none by default."""

    enable_per_request_metrics: bool = False
    per_request_spec_decode_metrics: SpecDecodeLevel = "none"

    def of(self, plan: Plan, outputs: Sequence[ChoiceOutput]) -> dict[str, Any] | None:
        """None if no metrics are enabled or, as in vLLM, if there are several choices."""
        if len(outputs) != 1:
            return None
        (output,) = outputs
        metrics = _times(output) if self.enable_per_request_metrics else {}
        if self.per_request_spec_decode_metrics != "none":
            spec_decode = _spec_decode(output, plan.model.num_speculative_tokens)
            if spec_decode and output.route is not None:
                spec_decode["route"] = output.route
            if spec_decode and self.per_request_spec_decode_metrics == "detailed":
                spec_decode |= {"per_step_accepted": output.accepted, "per_step_drafted": output.drafted}
            metrics |= {"speculative_decoding": spec_decode} if spec_decode else {}
        return metrics or None


NO_METRICS = PerRequestMetrics()


def _times(output: ChoiceOutput) -> dict[str, Any]:
    """Milliseconds since the request's arrival here. `queue_time_ms` is the engine's; vLLM servers do not report it."""
    times, num_tokens = output.times, len(output.token_ids)
    if times is None or not num_tokens:
        return {}
    decode_s, whole_s = times.last - times.first, times.last - times.arrived
    return {
        "time_to_first_token_ms": (times.first - times.arrived) * 1e3,
        "generation_time_ms": decode_s * 1e3,
        "queue_time_ms": None if output.queued_s is None else output.queued_s * 1e3,
        "mean_itl_ms": decode_s * 1e3 / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / whole_s if whole_s > 0 else None,
    }


def _spec_decode(output: ChoiceOutput, num_spec_tokens: int) -> dict[str, Any]:
    """vLLM's `speculative_decoding`. Entry j of the histogram: verifications that accepted j drafts. Empty if the
    engine reports no verifications."""
    rounds = output.accepted
    if not num_spec_tokens or (not rounds and len(output.token_ids) > 1):
        return {}
    num_accepted, num_drafted = sum(rounds), sum(output.drafted)
    return {
        "mean_acceptance_length": 1.0 + num_accepted / len(rounds) if rounds else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [rounds.count(j) for j in range(max([num_spec_tokens, *rounds]) + 1)],
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": num_spec_tokens,
        "first_verification": _part(rounds[:1], output.drafted[:1]),
        "later_verifications": _part(rounds[1:], output.drafted[1:]),
    }


def _part(accepted: Sequence[int], drafted: Sequence[int]) -> dict[str, int]:
    """The first verification of a handed-off request is of the prefill engine's drafts."""
    return {"num_accepted_draft_tokens": sum(accepted), "num_draft_tokens": sum(drafted)}
