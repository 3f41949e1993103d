"""Common bases of several architectures of one family."""
