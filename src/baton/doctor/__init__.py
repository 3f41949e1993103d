"""`baton doctor`: asks running servers what they are, and finds what would fail between them before traffic does.

The modules that ask (`ask`, `ask_vllm`, `host`, `trial`) collect facts; those that judge are pure.
"""
