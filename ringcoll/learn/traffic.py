"""What a compiled program sends."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringcoll import overlap


@dataclass(frozen=True)
class Sent:
    """What a program sends: for each kind of collective, the number and the bytes of a rank."""

    kinds: Mapping[str, tuple[int, float]]

    @property
    def bytes(self) -> float:
        """The bytes of all collectives."""
        return sum(size for _, size in self.kinds.values())

    @property
    def permuted(self) -> float:
        """The bytes of permutes; ringcoll's collectives send only permutes."""
        return self.kinds.get("collective-permute", (0, 0))[1]

    def __str__(self) -> str:
        """`all-gather, 14 collective-permute`"""
        words = (f"{n} {kind}" if n > 1 else kind for kind, (n, _) in self.kinds.items())
        return ", ".join(words) or "none"


def sent(compiled: Any) -> Sent:
    """What a compiled program sends.

    A permute sends the bytes of its operand. A built-in collective counts with the bytes that the
    best algorithm sends (see `ringcoll.overlap`).

    >>> gather = ranks(lambda x: ringcoll.all_gather(x, "x", algorithm="ring"))
    >>> found = learn.sent(gather.lower(jnp.arange(8.0)).compile())
    >>> print(found, "of", found.bytes / 3, "bytes each")
    3 collective-permute of 8.0 bytes each
    """
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for row in overlap.report(compiled).rows:
        count[row.kind] += row.count
        size[row.kind] += round(row.count * row.bytes)
    return Sent({kind: (count[kind], size[kind]) for kind in sorted(count)})


def messages(compiled: Any) -> int:
    """How many messages a rank sends in a compiled program; a message in a loop counts each turn.

    >>> gather = ranks(lambda x: ringcoll.all_gather(x, "x", algorithm="bruck"))
    >>> learn.messages(gather.lower(jnp.arange(8.0)).compile())
    2
    """
    return sent(compiled).kinds.get("collective-permute", (0, 0))[0]
