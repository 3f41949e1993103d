"""A router's whole configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.openai.http.access import OPEN, Access
from baton.openai.http.limits import HttpLimits
from baton.openai.request_metrics import NO_METRICS, PerRequestMetrics
from baton.openai.tools import NO_PARSING, Parsing
from baton.router.config.router_settings import RouterSettings
from baton.router.timers import RouterTimers
from baton.router.workers.loads import RouterProcess
from baton.text import ContentFormatOption, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(RouterSettings):
    """A router's settings, and what its process adds to them.

    - `prefill`, `decode`, `both`: base URLs of engines by role. `discover`: DNS names whose addresses are engines.
    - `kv_event_source`, `kv_event_replay_source`: `URL=ENDPOINT` of engines that do not report where they publish.
    - `chat_template` (a text) None: the checkpoint's. `chat_template_content_format`: how it reads the content of
      messages.
    - `load_tokenizer`: from a directory; None: with this chat template.
    - `worker`: which of the router's processes this is; None: the only one.
    - `admin_token` None: engines cannot join or leave at run time. `host_names`: the router's names for `Admin`.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    discover: tuple[str, ...] = ()
    # Unlike in commands, every prompt is handed off.
    max_local_prefill_length: int = 0
    ticket_key: bytes | None = None
    kv_event_source: tuple[str, ...] = ()
    kv_event_replay_source: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_content_format: ContentFormatOption = "auto"
    timers: RouterTimers = field(default_factory=RouterTimers)
    admin_token: str | None = None
    host_names: tuple[str, ...] = ()
    limits: HttpLimits = field(default_factory=HttpLimits)
    access: Access = OPEN
    parsing: Parsing = NO_PARSING
    per_request: PerRequestMetrics = NO_METRICS
    worker: RouterProcess | None = None
    load_tokenizer: Callable[[str], Tokenizer] | None = None
