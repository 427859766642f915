"""What the lessons and tutorials share: ranks on any machine, checks that print, and counts.

A notebook starts with `learn.start()`, which makes eight CPU devices; they are its ranks. A lesson
prints its statements with `claim`; a tutorial compares several ways to one result with `agree`.
Both fail if what they print is not true.
"""

from ringcoll.learn.checks import agree, claim, gamma, show
from ringcoll.learn.ranks import integers, make_mesh, place, start
from ringcoll.learn.traffic import Sent, messages, sent

__all__ = [
    "Sent",
    "agree",
    "claim",
    "gamma",
    "integers",
    "make_mesh",
    "messages",
    "place",
    "sent",
    "show",
    "start",
]
