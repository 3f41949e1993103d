"""Output that follows a grammar: JSON of a schema, a regular expression, a choice, or a context-free grammar.

The grammars are those of `llguidance` (Microsoft, MIT licence), vLLM's `guidance` backend. What is allowed next is a
function of a request's output tokens alone, so an engine that takes a request over derives it from the tokens.
"""

from importlib.metadata import version

from baton.structured.drafting import Constrained, DraftMatchers, Known
from baton.structured.grammars import Grammars
from baton.structured.matcher import Allowed, Matcher

# Another version may allow other tokens.
LIBRARY = f"llguidance {version('llguidance')}"

__all__ = ["LIBRARY", "Allowed", "Constrained", "DraftMatchers", "Grammars", "Known", "Matcher"]
