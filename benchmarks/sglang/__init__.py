"""Baton's plug-in in SGLang beside SGLang's own transfer backend."""
