"""Find out how a program runs: its plans, and where algorithms or processes differ or hang."""

from ringcoll.debug.consistent import check_consistent
from ringcoll.debug.same import same_by_all
from ringcoll.debug.watchdog import STATUS, deadline

__all__ = ["STATUS", "check_consistent", "deadline", "same_by_all"]
