"""The OpenAI API (`service.OpenAIService`) over any source of tokens (`backend.Backend`): an engine or a router."""

from baton.openai.backend import Backend, ServedModel
from baton.openai.http.metrics import FrontMetrics
from baton.openai.service import OpenAIService

__all__ = ["Backend", "FrontMetrics", "OpenAIService", "ServedModel"]
