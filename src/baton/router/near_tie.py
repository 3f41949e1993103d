"""Near-ties: engines whose logits differ only by rounding may choose different first tokens."""

from __future__ import annotations

from baton.router.clients.engine_client import EngineClient
from baton.router.join import Joined, TokenMismatch
from baton.sampling_params import MAX_LOGPROBS, SamplingParams
from baton.wire import GenerateRequest


async def measure_gap(client: EngineClient, joined: Joined, mismatch: TokenMismatch) -> float | None:
    """The gap in nats between the logprobs of a mismatch's two tokens, as `client`'s engine computes them. None if it
    proves nothing: the token was drawn or biased, or one of them is not among the `MAX_LOGPROBS` most likely.

    Raises the errors of the engine's leg.
    """
    params = joined.request.sampling_params
    if not _is_plain(params):
        return None
    before = joined.token_ids[: mismatch.position]
    probe = GenerateRequest(
        request_id=f"{joined.request.request_id}.tie{mismatch.position}",
        prompt_token_ids=joined.request.prompt_token_ids + before,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True),
        adapter=joined.request.adapter,
    )
    logprobs: dict[int, float] = {}
    async for chunk in client.generate(probe):
        for token in chunk.logprobs or ():
            logprobs |= dict(token.top)
    if mismatch.sent not in logprobs or mismatch.said not in logprobs:
        return None
    return abs(logprobs[mismatch.sent] - logprobs[mismatch.said])


def _is_plain(params: SamplingParams) -> bool:
    plain = SamplingParams(temperature=0.0)
    return params.structured_outputs is None and all(
        getattr(params, name) == getattr(plain, name)
        for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    )
