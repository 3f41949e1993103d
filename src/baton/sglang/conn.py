"""SGLang's four classes of a transfer backend, over `RankLegs`. Peers are named by tickets, not by a bootstrap
server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
    PrefillServerInfo,
)

from baton.errors import ProtocolError
from baton.sglang import compat
from baton.sglang.legs import LegPhase, RankLeg, ReceiverLeg, SenderLeg
from baton.sglang.rank_backend import start_rank_backend

_PHASES = {"ready": KVPoll.WaitingForInput, "moving": KVPoll.Transferring, "done": KVPoll.Success}


class _AnyPrefill(dict[str, PrefillServerInfo]):
    """Answers SGLang's questions about a prefill server before it makes a receiver; the ticket decides."""

    def get(self, key: str, default: Any = None) -> Any:
        return _ONE_RANK


class _OneRank:
    dp_size = 1
    follow_bootstrap_room = True


_ONE_RANK = _OneRank()


class BatonKVManager(CommonKVManager):
    """One rank's backend. `queue`: the scheduler's queue that makes this manager, set by `hooks`."""

    queue: Any = None

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        from sglang.srt.runtime_context import get_parallel

        server = compat.resolved(server_args)
        compat.check_server(server, get_parallel())
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        # SGLang's socket would take messages from anyone.
        self.server_socket.close(linger=0)
        self.prefill_info_table = _AnyPrefill()
        self.backend = start_rank_backend(args, disaggregation_mode.value, server, type(self).queue)

    def register_to_bootstrap(self) -> None:
        """Nothing: routers ask the server for its identity (`hooks`)."""

    def phase_of(self, leg: RankLeg) -> LegPhase:
        """With several tensor ranks, the phase of the last `agree`."""
        return leg.agreed if self.backend.num_ranks > 1 else self.backend.legs.poll(leg)


def agree(pollers: Sequence[Any], group: Any) -> None:
    """Let the tensor ranks of `group` agree on the phases to report next. Collective."""
    ours = [each for each in pollers if isinstance(each, BatonKVSender | BatonKVReceiver)]
    if ours and (backend := ours[0].kv_mgr.backend).num_ranks > 1:
        backend.legs.agree([each.leg for each in ours], lambda values: compat.all_reduce_min(values, group))


class BatonKVSender(CommonKVSender):
    """A prefill leg. `bind` must follow the construction."""

    def __init__(
        self,
        mgr: BatonKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._row: int | None = None
        self.leg: SenderLeg

    def bind(self, request: Any) -> None:
        self.leg = self.kv_mgr.backend.legs.open_prefill(compat.ticket_of(request), compat.prompt_of(request))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index

    def scheduled(self) -> None:
        self.kv_mgr.backend.legs.scheduled(self.leg)

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        pages = compat.request_pages(self.kv_mgr.kv_args, kv_indices, state_indices)
        rows, row = self.kv_mgr.backend.rows, self._row
        assert num_kv_tokens is not None
        assert row is not None
        self.kv_mgr.backend.legs.computed(self.leg, pages, num_kv_tokens, lambda: rows.read(row))

    def poll(self) -> int:
        phase = self.kv_mgr.phase_of(self.leg)
        if phase == "failed":
            return int(KVPoll.Failed)
        if self._row is None:  # SGLang knows no other phases before `init`
            return int(KVPoll.Bootstrapping if self.leg.aborted else KVPoll.WaitingForInput)
        return int(_PHASES[phase])

    def abort(self) -> None:
        self.kv_mgr.backend.legs.abort(self.leg)

    def pop_decode_prefix_len(self) -> int:
        """All tokens are declared; D asks for those that it lacks."""
        return 0

    def get_max_transfer_tokens(self) -> int | None:
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def get_transfer_metric(self) -> Any:
        return KVTransferMetric()

    def clear(self) -> None:
        pass

    def failure_exception(self) -> None:
        raise _error(self.bootstrap_room, self.leg)


class BatonKVReceiver(CommonKVReceiver):
    """A decode leg. `bind` must follow the construction."""

    def __init__(self, mgr: BatonKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.conclude_state = None
        self.require_staging = False
        self.abort_notified = False
        self._row: int | None = None
        self._written = False
        self.leg: ReceiverLeg

    def bind(self, request: Any) -> None:
        self.leg = self.kv_mgr.backend.legs.open_decode(compat.ticket_of(request), compat.prompt_of(request))

    def init(self, prefill_dp_rank: int) -> None:
        pass

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **further: Any,
    ) -> None:
        self._row = aux_index
        pages = compat.request_pages(self.kv_mgr.kv_args, kv_indices, state_indices)
        self.kv_mgr.backend.legs.place(self.leg, decode_prefix_len or 0, pages)

    def poll(self) -> int:
        phase = self.kv_mgr.phase_of(self.leg)
        if phase == "done" and not self._written:
            phase = self._fill_row()
        if phase in ("failed", "done"):
            return int(KVPoll.Failed if phase == "failed" else KVPoll.Success)
        if self._row is not None:
            return int(KVPoll.Transferring)
        # SGLang knows no other phases before `send_metadata`.
        waits = phase == "waiting" or self.leg.aborted
        return int(KVPoll.Bootstrapping if waits else KVPoll.WaitingForInput)

    def _fill_row(self) -> LegPhase:
        leg, self._written = self.leg, True
        assert leg.seeds is not None
        assert self._row is not None
        try:
            self.kv_mgr.backend.rows.write(self._row, leg.seeds)
        except ProtocolError as error:
            leg.fail(str(error))
        return leg.phase

    def abort(self) -> None:
        self.kv_mgr.backend.legs.abort(self.leg)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing: a leg fails only when its pages are quiet."""

    def clear(self) -> None:
        pass

    def failure_exception(self) -> None:
        raise _error(self.bootstrap_room, self.leg)


class BatonKVBootstrapServer(BaseKVBootstrapServer):
    """Empty: clients choose no address."""

    def __init__(self, host: str, port: int) -> None:
        pass


def _error(room: int | None, leg: RankLeg) -> KVTransferError:
    return KVTransferError(room, leg.why or "failed")
