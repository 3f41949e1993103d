"""The OpenAI API over any source of tokens; an engine's server and the router share every line of it.

`backend.Backend` is the seam: it yields `TokenChunk`s for one `GenerateRequest`. `service.OpenAIService` does
the rest.
"""

from baton.openai.backend import Backend, ServedModel
from baton.openai.metrics import FrontMetrics
from baton.openai.service import OpenAIService

__all__ = ["Backend", "FrontMetrics", "OpenAIService", "ServedModel"]
