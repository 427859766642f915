"""Those commands of `python -m ringcoll` that have no room of their own, and what they share."""
