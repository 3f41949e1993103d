"""Mutation testing: small changes of the code, each of which a package's tests should notice."""
