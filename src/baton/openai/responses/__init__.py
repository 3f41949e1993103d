"""OpenAI's Responses API, stateless and served as chats: each request has the whole conversation."""

from baton.openai.responses.answer import ResponsePlan, make_response_plan, respond

__all__ = ["ResponsePlan", "make_response_plan", "respond"]
