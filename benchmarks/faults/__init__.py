"""Deployments under faults and overload, and for long."""
