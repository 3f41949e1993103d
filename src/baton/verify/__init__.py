"""`baton verify`: proves, request by request, that a deployment answers exactly as its reference."""

from baton.verify.compare import Difference, Report, compare_answers
from baton.verify.observe import Case, Observed

__all__ = ["Case", "Difference", "Observed", "Report", "compare_answers"]
