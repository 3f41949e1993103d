"""Several router processes that serve one port (`--workers`)."""
