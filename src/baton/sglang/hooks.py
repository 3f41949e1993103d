"""Installs the backend in SGLang, through its plug-in framework (`sglang.srt.plugins`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "baton"
_DISAGGREGATION = "sglang.srt.disaggregation"
_PREFILL_QUEUE = f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue"
_DECODE_QUEUE = f"{_DISAGGREGATION}.decode.DecodePreallocQueue"
_MIXIN = f"{_DISAGGREGATION}.prefill.SchedulerDisaggregationPrefillMixin"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# Seconds after which an idle scheduler looks for new requests again.
_REST_S = 0.0005


def install() -> None:
    from enum import Enum

    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([NAME])
    members = {member.name: member.value for member in TransferBackend} | {"BATON": NAME}
    extended = Enum("TransferBackend", members, module=TransferBackend.__module__)  # type: ignore[misc]
    HookRegistry.register(f"{_DISAGGREGATION}.utils.TransferBackend", extended, HookType.REPLACE)
    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (f"{_DISAGGREGATION}.utils.get_kv_class", _kv_class, HookType.AROUND),
        (f"{_DISAGGREGATION}.utils.poll_and_all_reduce", _poll_together, HookType.AROUND),
        (f"{_DISAGGREGATION}.decode._bootstrap_addr", _address, HookType.AROUND),
        (f"{_PREFILL_QUEUE}._init_kv_manager", _with_queue, HookType.AROUND),
        (f"{_DECODE_QUEUE}._init_kv_manager", _with_queue, HookType.AROUND),
        (f"{_PREFILL_QUEUE}.create_sender", _bind_sender, HookType.AFTER),
        (f"{_DECODE_QUEUE}._create_receiver_and_enqueue", _bind_receiver, HookType.AFTER),
        (f"{_MIXIN}.get_next_disagg_prefill_batch_to_run", _scheduled, HookType.AFTER),
        (f"{_MIXIN}.process_batch_result_disagg_prefill", _stream_first_tokens, HookType.AFTER),
        (f"{_SCHEDULER}.on_idle", _rest, HookType.AFTER),
        (f"{_SCHEDULER}.get_internal_state", _add_identity, HookType.AFTER),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)


def _kv_class(original: Callable[..., Any], backend: Any, class_type: Any) -> Any:
    if backend.value != NAME or class_type.value == "kvargs":
        return original(backend, class_type)
    from baton.sglang import conn

    return {
        "manager": conn.BatonKVManager,
        "sender": conn.BatonKVSender,
        "receiver": conn.BatonKVReceiver,
        "bootstrap_server": conn.BatonKVBootstrapServer,
    }[class_type.value]


def _poll_together(original: Callable[..., Any], pollers: Any, gloo_group: Any, *args: Any, **kwargs: Any) -> Any:
    from baton.sglang.conn import agree

    agree(pollers, gloo_group)
    return original(pollers, gloo_group, *args, **kwargs)


def _address(original: Callable[..., Any], request: Any) -> str:
    """SGLang's decode scheduler raises an exception for a request without `bootstrap_host`."""
    return "" if request.bootstrap_host is None else str(original(request))


def _with_queue(original: Callable[..., Any], queue: Any) -> Any:
    """The manager needs the scheduler's pools, which its arguments name only by address."""
    from baton.sglang.conn import BatonKVManager

    BatonKVManager.queue = queue
    try:
        return original(queue)
    finally:
        BatonKVManager.queue = None


def _bind_sender(created: bool, queue: Any, request: Any, num_kv_heads: int) -> None:
    from baton.sglang.conn import BatonKVSender

    if created and isinstance(request.disagg_kv_sender, BatonKVSender):
        request.disagg_kv_sender.bind(request)


def _bind_receiver(decode: Any, queue: Any, request: Any, is_rebootstrap: bool = False) -> None:
    from baton.sglang.conn import BatonKVReceiver

    if isinstance(decode.kv_receiver, BatonKVReceiver):
        decode.kv_receiver.bind(request)


def _scheduled(plan: Any, *args: Any, **kwargs: Any) -> None:
    from baton.sglang.conn import BatonKVSender

    for request in plan.batch_to_run.reqs if plan.batch_to_run else ():
        if isinstance(request.disagg_kv_sender, BatonKVSender):
            request.disagg_kv_sender.scheduled()


def _stream_first_tokens(result: None, scheduler: Any, batch: Any, *args: Any) -> None:
    """Streams first tokens at once: SGLang's prefill server answers only after the transfer, too late for a router's
    client."""
    from baton.sglang.conn import BatonKVSender

    waiting = {id(request) for request in scheduler.disagg_prefill_inflight_queue}
    for request in batch.reqs:
        ours = isinstance(request.disagg_kv_sender, BatonKVSender)
        if ours and request.stream and id(request) in waiting and not request.finished():
            scheduler.output_streamer.stream_output([request], request.return_logprob)


def _manager(scheduler: Any) -> Any:
    from baton.sglang.conn import BatonKVManager

    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    manager = getattr(queue, "kv_manager", None)
    return manager if isinstance(manager, BatonKVManager) else None


def _rest(result: None, scheduler: Any, *args: Any) -> None:
    if (manager := _manager(scheduler)) is not None:
        manager.backend.legs.rest(_REST_S)


def _add_identity(answer: Any, scheduler: Any, *args: Any) -> None:
    import time

    import msgspec

    if (manager := _manager(scheduler)) is not None:
        identity = msgspec.structs.replace(manager.backend.identity, clock=time.monotonic())
        answer.internal_state[NAME] = {
            **msgspec.to_builtins(identity),
            "counts": manager.backend.counts(),
        }
