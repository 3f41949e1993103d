"""What LangChain, LiteLLM and `llm` really send, for `tests/clients`, whose environment they are too large for."""
