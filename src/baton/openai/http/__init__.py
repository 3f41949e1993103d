"""The HTTP server: connections, limits, TLS, errors, startup and shutdown."""
