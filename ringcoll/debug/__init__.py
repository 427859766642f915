"""Tools that find where algorithms or processes differ, and where processes hang."""

from ringcoll.debug.consistent import check_consistent
from ringcoll.debug.same import same_by_all
from ringcoll.debug.watchdog import STATUS, deadline

__all__ = ["STATUS", "check_consistent", "deadline", "same_by_all"]
