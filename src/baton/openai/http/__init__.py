"""The HTTP server under the API: connections, limits, TLS, errors, and the start and the end of serving."""
