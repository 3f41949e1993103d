"""The request fields of OpenAI, vLLM and SGLang that are refused by their names.

Honoured are the fields of `requests.CompletionRequest` and `requests.ChatRequest`. A field that could change the answer
and is not honoured is refused, unless it has a value at which it changes nothing. All others are ignored: those that
cannot change the answer, and names that none of the three know. docs/api.md shows the table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton.errors import RequestError

log = logging.getLogger(__name__)

_MAX_NEUTRAL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Refused:
    """`why` a field is not served, and the values at which it asks for nothing. null, [] and {} always do."""

    why: str
    neutral: tuple[object, ...] = ()


_DECODING = "is not supported: tokens are chosen by the sampling parameters alone"
_STRUCTURED = "is not supported: output is not constrained by a grammar"
_MULTIMODAL = "is not supported: only text is served"
_TOOLS = "is not supported: there are no tools"
_TEMPLATE = "is not supported: the prompt is what the model's own chat template makes of the messages"
_PROMPT = "is not supported: a prompt is taken as it is"
_OUTPUT = "is not supported: the answer does not hold it"
_ADAPTER = "is not supported: one model is served, without adapters"
_CACHE = "is not supported: equal prompts share their KV"
_PLACE = "is not a client's to choose: the router decides where a request runs"
_HANDOFF = "is not a client's to set: the router decides where KV goes"
_REASONING = "is not supported: an answer is not parsed for reasoning"

REFUSED: Mapping[str, Refused] = {
    **dict.fromkeys(
        ("bad_words", "allowed_token_ids", "repetition_detection", "thinking_token_budget", "custom_logit_processor"),
        Refused(_DECODING),
    ),
    **dict.fromkeys(("logits_processors", "custom_params", "vllm_xargs", "stop_regex"), Refused(_DECODING)),
    "use_beam_search": Refused(_DECODING, (False,)),
    "length_penalty": Refused(_DECODING, (1, 1.0)),
    "watermarking": Refused(_DECODING, (False,)),
    "no_stop_trim": Refused("is called include_stop_str_in_output here", (False,)),
    "spaces_between_special_tokens": Refused(_OUTPUT, (True,)),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"),
        Refused(_STRUCTURED),
    ),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern", "regex", "ebnf"), Refused(_STRUCTURED)),
    "response_format": Refused(_STRUCTURED, ({"type": "text"},)),
    **dict.fromkeys(("prompt_embeds", "input_ids", "truncate_prompt_tokens", "truncation_side"), Refused(_PROMPT)),
    **dict.fromkeys(("suffix", "session_params"), Refused(_PROMPT)),
    **dict.fromkeys(("chat_template", "documents", "task"), Refused(_TEMPLATE)),
    "continue_final_message": Refused(_TEMPLATE, (False,)),
    "echo": Refused(_OUTPUT, (False,)),
    **dict.fromkeys(("prompt_logprobs", "logprob_token_ids"), Refused(_OUTPUT)),
    **dict.fromkeys(
        (
            "return_hidden_states",
            "return_routed_experts",
            "return_cached_tokens_details",
            "return_prompt_token_ids",
            "return_prompt_text",
            "return_token_offsets",
            "return_mm_kwargs",
            "return_meta_info",
        ),
        Refused(_OUTPUT, (False,)),
    ),
    **dict.fromkeys(("routed_experts_prompt_start", "routed_experts_start_len"), Refused(_OUTPUT, (0,))),
    **dict.fromkeys(("audio", "media_io_kwargs", "mm_processor_kwargs", "images_config"), Refused(_MULTIMODAL)),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), Refused(_MULTIMODAL)),
    "use_audio_in_video": Refused(_MULTIMODAL, (False,)),
    "modalities": Refused(_MULTIMODAL, (["text"],)),
    "mm_payload": Refused(_MULTIMODAL, ("tensors",)),
    **dict.fromkeys(("tools", "functions", "web_search_options"), Refused(_TOOLS)),
    **dict.fromkeys(("tool_choice", "function_call"), Refused(_TOOLS, ("none", "auto"))),
    **dict.fromkeys(("moderation", "verbosity"), Refused("is not supported")),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), Refused(_REASONING, (True,))),
    "reasoning": Refused("is called reasoning_effort here"),
    **dict.fromkeys(("lora_path", "lora_request", "adapter_id"), Refused(_ADAPTER)),
    **dict.fromkeys(("cache_salt", "extra_key", "ngram_corpus_id"), Refused(_CACHE)),
    "priority": Refused(_PLACE, (0,)),
    **dict.fromkeys(("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"), Refused(_PLACE)),
}

# By these other servers let a client steer a handoff. Refused whatever their value; null counts as absent.
FORBIDDEN = frozenset(
    (
        "kv_transfer_params",
        "ec_transfer_params",
        "disaggregated_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "remote_host",
        "remote_port",
        "handoff",
        "ticket",
    )
)


def refuse_unserved(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise `RequestError` naming the first of a body's fields that asks for what is not served."""
    for name in fields.keys() & (REFUSED.keys() | FORBIDDEN):
        raw = memoryview(fields[name])
        value = msgspec.json.decode(raw) if len(raw) <= _MAX_NEUTRAL_BYTES else raw
        if value is None:
            continue
        if name in FORBIDDEN:
            log.warning("refused a client's request that sets %s", name)
            raise RequestError(f"{name} {_HANDOFF}", name)
        refused = REFUSED[name]
        if value not in ([], {}) and not any(value == v and type(value) is type(v) for v in refused.neutral):
            raise RequestError(f"{name} {refused.why}", name)
