"""Transformations of a user's function: it is traced, walked, and evaluated with other calls."""

from ringcoll.transform.overlapping import overlapped
from ringcoll.transform.places import Place
from ringcoll.transform.replacing import replaced

__all__ = ["Place", "overlapped", "replaced"]
