"""`baton doctor` (docs/operations.md).

`ask`, `ask_vllm`, `host` and `trial` collect facts; the modules that judge them are pure.
"""
