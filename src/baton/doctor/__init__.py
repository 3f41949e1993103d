"""`baton doctor`: asks running servers what they are, and finds what would fail between them before traffic does.

`ask`, `ask_vllm`, `host` and `trial` collect facts; the modules that judge them are pure.
"""
