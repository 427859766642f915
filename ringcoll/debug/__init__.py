"""Find out how a program runs: its plans, and where several processes differ or hang."""

from ringcoll.debug.consistent import check_consistent
from ringcoll.debug.watchdog import STATUS, deadline

__all__ = ["STATUS", "check_consistent", "deadline"]
