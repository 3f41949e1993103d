"""Structured outputs (docs/api.md).

Grammars are those of `llguidance` (Microsoft, MIT licence), vLLM's `guidance` backend. The allowed tokens depend only
on the output tokens, so an engine that takes over a request derives them.
"""

from importlib.metadata import version

from baton.structured.drafting import Constrained, DraftMatchers, Known
from baton.structured.grammars import Grammars
from baton.structured.matcher import Allowed, Matcher

# Other versions may allow other tokens.
LIBRARY = f"llguidance {version('llguidance')}"

__all__ = ["LIBRARY", "Allowed", "Constrained", "DraftMatchers", "Grammars", "Known", "Matcher"]
