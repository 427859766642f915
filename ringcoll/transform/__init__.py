"""Transformations of a user's function: it is traced, walked, and evaluated with other calls."""

from ringcoll.transform.overlapping import overlapped
from ringcoll.transform.replacing import replaced
from ringcoll.transform.sites import Site
from ringcoll.transform.trying import Trial, tried

__all__ = ["Site", "Trial", "overlapped", "replaced", "tried"]
