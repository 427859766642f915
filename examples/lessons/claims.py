"""Shared by the lessons: a claim, which is printed or fails, and a count of messages."""

from jax.stages import Compiled

from ringcoll import overlap


def claim(text: str, holds: object) -> None:
    """Print a claim that holds.

    Raises:
        AssertionError: it does not hold.
    """
    if not holds:
        raise AssertionError(f"it does not hold: {text}")
    print(f"✓ {text}")


def permutes(program: Compiled) -> int:
    """How many messages each rank sends in a compiled program; those in a loop count every turn."""
    rows = overlap.report(program).rows
    return sum(row.count for row in rows if row.kind == "collective-permute")
