"""Tools that read the docstrings and comments of `src/baton`."""
