"""The HTTP server: connections, limits, TLS, errors, start and end of serving."""
