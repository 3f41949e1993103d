"""Request fields of OpenAI, vLLM and SGLang refused by name; docs/api.md has the table.

Those of `CompletionRequest` and `ChatRequest` are supported; others, if their value could change the response, are not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from baton.errors import RequestError
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

_MAX_NEUTRAL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Refused:
    """`why` a field is refused, and its values without effect, besides null, [] and {}."""

    why: str
    neutral: tuple[object, ...]


_DECODING = "is not supported: tokens are chosen by the sampling parameters alone"
_STRUCTURED = "is called structured_outputs here"
_MULTIMODAL = "is not supported: only text is served"
_TOOLS = "is not supported: tools are functions, in the field tools"
_TEMPLATE = "is not supported: the prompt is what the server's chat template makes of the messages"
_PROMPT = "is not supported: a prompt is taken as it is"
_OUTPUT = "is not supported: the answer does not hold it"
_ADAPTER = "is not supported: name an adapter as the model (a router over vLLM servers has them)"
_CACHE = "is not supported: equal prompts share their KV"
_PLACE = "is not a client's to choose: the router decides where a request runs"
_HANDOFF = "is not a client's to set: the router decides where KV goes"
_REASONING = "is not supported: with --reasoning-parser reasoning is always separate, and streamed"

# Reason for refusal, values without effect, names.
_UNSERVED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    (_DECODING, (), "repetition_detection thinking_token_budget stop_regex vllm_xargs"),
    (_DECODING, (), "custom_logit_processor logits_processors custom_params"),
    (_DECODING, (False,), "use_beam_search watermarking"),
    (_DECODING, (1, 1.0), "length_penalty"),
    ("is called include_stop_str_in_output here", (False,), "no_stop_trim"),
    (_STRUCTURED, (), "guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf"),
    (_STRUCTURED, (), "guided_decoding_backend guided_whitespace_pattern"),
    (_PROMPT, (), "prompt_embeds input_ids truncation_side session_params"),
    (_PROMPT, ("",), "suffix"),
    (_TEMPLATE, (), "chat_template documents task"),
    (_OUTPUT, (), "logprob_token_ids"),
    (_OUTPUT, (True,), "spaces_between_special_tokens"),
    (_OUTPUT, (False,), "return_hidden_states return_routed_experts return_cached_tokens_details"),
    (_OUTPUT, (False,), "return_prompt_token_ids return_prompt_text return_token_offsets return_mm_kwargs"),
    (_OUTPUT, (False,), "return_meta_info"),
    (_OUTPUT, (0,), "routed_experts_prompt_start routed_experts_start_len"),
    (_MULTIMODAL, (), "audio media_io_kwargs mm_processor_kwargs images_config max_dynamic_patch min_dynamic_patch"),
    (_MULTIMODAL, (False,), "use_audio_in_video"),
    (_MULTIMODAL, (["text"],), "modalities"),
    (_MULTIMODAL, ("tensors",), "mm_payload"),
    (_TOOLS, (), "functions web_search_options"),
    (_TOOLS, ("none", "auto"), "function_call"),
    ("is not supported", (), "moderation"),
    ("is not supported", ("medium",), "verbosity"),
    (_REASONING, (True,), "separate_reasoning stream_reasoning"),
    ("is called reasoning_effort here", (), "reasoning"),
    (_ADAPTER, (), "lora_path lora_request adapter_id"),
    (_CACHE, (), "extra_key ngram_corpus_id"),
    (_PLACE, (), "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank"),
)
NOTHING_ELSE: Mapping[str, Refused] = MappingProxyType({})
REFUSED = {name: Refused(why, neutral) for why, neutral, names in _UNSERVED for name in names.split()}

# Clients of other servers control a handoff with these: only null is accepted.
FORBIDDEN = {"kv_transfer_params", "ec_transfer_params", "disaggregated_params", "handoff", "ticket"}
FORBIDDEN |= {"bootstrap_host", "bootstrap_port", "bootstrap_room", "remote_host", "remote_port"}
_NAMES = REFUSED.keys() | FORBIDDEN


def is_empty(field: msgspec.Raw) -> bool:
    """Whether it is [] or {}, which count as absent."""
    raw = memoryview(field)
    return raw[0] in b"[{" and len(raw) <= _MAX_NEUTRAL_BYTES and not msgspec.json.decode(raw)


def refuse_unserved(
    fields: Mapping[str, msgspec.Raw], also: Mapping[str, Refused] = NOTHING_ELSE, served: Collection[str] = ()
) -> None:
    """Raise `RequestError` for unsupported values. `also`: refused too; `served`: not."""
    asked = fields.keys()
    for name in sorted((asked & _NAMES | asked & also.keys()).difference(served)):
        refused = also.get(name) or REFUSED.get(name)
        raw = memoryview(fields[name])
        value = msgspec.json.decode(raw) if len(raw) <= _MAX_NEUTRAL_BYTES else raw
        if value is None:
            continue
        if refused is None or name in FORBIDDEN:
            log.warning("refused a client's request that sets %s", name)
            raise RequestError(f"{name} {_HANDOFF}", name)
        if value not in ([], {}) and not any(value == v and type(value) is type(v) for v in refused.neutral):
            raise RequestError(f"{name} {refused.why}", name)
