"""A deployment on one host: a router and engines as child processes."""

from baton.children import end_processes
from baton.deployment.child import Reporter, read_reports, read_rest
from baton.deployment.child_log import LogLine
from baton.deployment.processes import BATON, FLAG_VARIABLES, Deployment, check_shared_transport

__all__ = [
    "BATON",
    "FLAG_VARIABLES",
    "Deployment",
    "LogLine",
    "Reporter",
    "check_shared_transport",
    "end_processes",
    "read_reports",
    "read_rest",
]
