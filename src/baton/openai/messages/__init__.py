"""Anthropic's Messages API, served as chats."""

from baton.openai.messages.answer import count_tokens, make_message_plan, respond
from baton.openai.messages.message_errors import error_body, error_event

__all__ = ["count_tokens", "error_body", "error_event", "make_message_plan", "respond"]
