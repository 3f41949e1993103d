"""Observability for operators: acceptance and its alarms, requests and their timelines."""
