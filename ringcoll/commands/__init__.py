"""The commands of `python -m ringcoll`, and what they share."""
