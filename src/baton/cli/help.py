"""The format of `--help`: flags in groups, as plain text of any width, then an example."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from baton.cli.flag_sources import named_after_source
from baton.errors import ConfigError

_ROLES, _OTHERS = "Engines of one role", "Options"
_PANELS: tuple[tuple[str, str], ...] = (
    (
        "Comparison",
        "modes reference candidate reference_metrics candidate_metrics logprob_tolerance acceptance_tolerance",
    ),
    (
        "Requests",
        "lengths prompts chat add_special_tokens turns token_range max_tokens temperature top_p top_k min_p ignore_eos "
        "logprobs concurrency request_timeout",
    ),
    ("Deployment", "prefill decode both discover workers engine_port_base max_restarts role engine_id config"),
    (_ROLES, ""),  # by their prefix
    (
        "Model",
        "revision served_model_name dtype quantization device max_model_len seed attention_backend batch_invariant "
        "reduction_slices generation_config override_generation_config",
    ),
    ("Speculation and handoff", "speculative_config kv_transfer_config kv_transport integrity kv_stream recovery"),
    (
        "Memory and batches",
        "block_size max_num_batched_tokens max_prefill_tokens_with_decodes max_decode_gap_s max_num_seqs "
        "kv_cache_memory "
        "gpu_memory_utilization engines_per_host enable_prefix_caching kv_events_config mamba_block_size "
        "max_queued_requests queue_timeout_s stall_timeout_s",
    ),
    ("Ranks", "tensor_parallel_size pipeline_parallel_size data_parallel_size"),
    (
        "Routing",
        "kv_mode policy prefill_policy decode_policy policy_config max_local_prefill_length "
        "allow_mode_override admin_token_file token_api engine kv_connector seed_first_token "
        "kv_event_source kv_event_replay_source",
    ),
    (
        "Answers",
        "tokenizer chat_template chat_template_content_format enable_auto_tool_choice tool_call_parser "
        "reasoning_parser "
        "enable_per_request_metrics per_request_spec_decode_metrics near_tie",
    ),
    (
        "Server",
        "host port http_write_timeout shutdown_timeout api_key allowed_origins ssl_keyfile ssl_certfile ssl_ca_certs "
        "ssl_cert_reqs "
        "ticket_key_file ticket_life keys log_level log_format",
    ),
    ("Traces", "otlp_traces_endpoint trace trace_sampling_ratio"),
)
_PANEL_OF = {name: panel for panel, names in _PANELS for name in names.split()}


def panel_of(name: str) -> str:
    own = name.startswith(("prefill_", "decode_"))
    return _PANEL_OF.get(name, _ROLES if own else _OTHERS)


class GroupedCommand(TyperCommand):
    """A command with flags in groups, in the order of `_PANELS`, and an unchanged epilog. Its errors about flags name
    the variable or file that set the flag."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise named_after_source(ctx, error) from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = "Arguments" if parameter.param_type_name == "argument" else panel_of(str(parameter.name))
                sections.setdefault(panel, []).append(record)
        order = ["Arguments", *(panel for panel, _ in _PANELS)]
        for panel in sorted(sections, key=lambda one: order.index(one) if one in order else len(order)):
            with formatter.section(panel):
                formatter.write_dl(sections[panel])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")
