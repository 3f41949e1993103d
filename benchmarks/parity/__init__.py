"""The matrix of equality: every target with every drafter, on one engine and handed over between two.

`make parity`, or `python -m benchmarks.parity --only llama/eagle3`. It runs from the repository: the tiny random
checkpoints and the engines stepped by hand are those of the tests.
"""
