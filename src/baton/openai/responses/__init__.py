"""OpenAI's Responses API, stateless and served as chats."""

from baton.openai.responses.answer import ResponsePlan, make_response_plan, respond

__all__ = ["ResponsePlan", "make_response_plan", "respond"]
