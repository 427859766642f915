"""For programs of several processes: finds where they differ, and where they hang."""

from ringcoll.debug.consistent import check_consistent
from ringcoll.debug.watchdog import STATUS, deadline

__all__ = ["STATUS", "check_consistent", "deadline"]
