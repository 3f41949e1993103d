"""OpenAI's Responses API, without state: each request brings the whole conversation, and is run as a chat."""

from baton.openai.responses.answer import ResponsePlan, make_response_plan, respond

__all__ = ["ResponsePlan", "make_response_plan", "respond"]
