"""The OpenAI API over any source of tokens. An engine's server and the router share it.

`backend.Backend` is the interface to the source of tokens, and `service.OpenAIService` the API over it.
"""

from baton.openai.backend import Backend, ServedModel
from baton.openai.metrics import FrontMetrics
from baton.openai.service import OpenAIService

__all__ = ["Backend", "FrontMetrics", "OpenAIService", "ServedModel"]
