"""The parity matrix: every target with every drafter, on one engine and handed over between two.

`make parity`, or `python -m benchmarks.parity --only llama/eagle3`. It needs the repository: the tiny random
checkpoints and the engines that are stepped by hand come from the tests.
"""
