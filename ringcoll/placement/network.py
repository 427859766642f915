"""The physical mesh: the place of each rank, and the links of each message."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

from ringcoll.costs.embedding import Coords

Link = tuple[Coords, Coords]  # directed: from, to

#: A report warns of messages over more hops than these.
FAR = 2


@dataclass(frozen=True)
class Network:
    """Ranks on a mesh or torus; each has a link, both ways, to its neighbours on each axis.

    `places[r]` is the place of rank r. Axis i is a ring if `wrap[i]`, else a line; the places say
    how long it is. A message goes along one axis after the other, each the shorter way. If both
    ways are equally short, it goes ahead, as in `costs.routes`. With `cores`, the last axis has the
    devices of a chip; they share the links to other chips.
    """

    places: tuple[Coords, ...]
    wrap: tuple[bool, ...]
    cores: bool = False
    stated: bool = True  # false: the devices are unknown, and each axis is assumed to be a ring

    @classmethod
    def ring(cls, *sizes: int) -> "Network":
        """Ranks in their order on a ring, or on one along each axis: if devices are unknown."""
        return cls(tuple(product(*map(range, sizes))), (True,) * len(sizes), stated=False)

    @cached_property
    def size(self) -> Coords:
        """How many places each axis has."""
        return tuple(max(axis) + 1 for axis in zip(*self.places, strict=True))

    def _steps(self, axis: int, start: int, stop: int) -> list[int]:
        """The places along one axis from start to stop, both included."""
        size, way = self.size[axis], 1 if stop >= start else -1
        length = abs(stop - start)
        if self.wrap[axis]:
            ahead = (stop - start) % size
            way, length = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
        return [(start + way * i) % size for i in range(length + 1)]

    def path(self, source: int, target: int) -> list[Link]:
        """The directed links that a message from one rank to another passes."""
        at, stop = list(self.places[source]), self.places[target]
        visited = [tuple(at)]
        for axis in range(len(at)):
            for step in self._steps(axis, at[axis], stop[axis])[1:]:
                at[axis] = step
                visited.append(tuple(at))
        return [self._link(*step) for step in pairwise(visited)]

    def _chip(self, place: Coords) -> Coords:
        return place[:-1] if self.cores else place

    def _link(self, start: Coords, stop: Coords) -> Link:
        """The link between neighbours: of their chips, or of two devices of one chip."""
        a, b = self._chip(start), self._chip(stop)
        return (start, stop) if a == b else (a, b)

    def hops(self, source: int, target: int) -> int:
        """How many links a message from one rank to another passes."""
        return self._distance(self.places[source], self.places[target])

    def _distance(self, a: Coords, b: Coords) -> int:
        """How many links there are between two places, or two chips."""
        return sum(
            len(self._steps(axis, *ends)) - 1 for axis, ends in enumerate(zip(a, b, strict=True))
        )

    @cached_property
    def _neighbours(self) -> dict[Coords, set[Coords]]:
        occupied, neighbours = set(self.places), {}
        for place in occupied:
            near = set()
            for axis, size in enumerate(self.size):
                for way in (1, -1):
                    step = place[axis] + way
                    if 0 <= step < size or self.wrap[axis]:
                        near.add((*place[:axis], step % size, *place[axis + 1 :]))
            neighbours[place] = (near & occupied) - {place}
        return neighbours

    def ports(self, group: Sequence[int]) -> int:
        """The number of links from a rank to others of its group, for the rank with the fewest.

        It is at least one. With any algorithm, a rank receives everything over these links.
        """
        members = {self.places[r] for r in group}
        return max(1, min(len(self._neighbours[place] & members) for place in members))

    @cached_property
    def link_count(self) -> int:
        """How many links there are between chips, each direction counted."""
        pairs = ((place, near) for place, all_near in self._neighbours.items() for near in all_near)
        return len({self._link(*pair) for pair in pairs if len({*map(self._chip, pair)}) > 1})

    def crossings(self, group: Sequence[int]) -> int:
        """The fewest links between chips that the shards of a group cross to reach all members.

        A shard crosses at least one link for each other chip, and at least as many links as the
        farthest member is away.
        """
        chips = list({self._chip(self.places[rank]) for rank in group})
        others, sides = len(chips) - 1, [*zip(self.size, self.wrap, strict=True)][: len(chips[0])]
        if not others or others >= sum(size // 2 if ring else size - 1 for size, ring in sides):
            return len(group) * others  # no two chips are more than this many links apart
        far = {a: max(others, *(self._distance(a, b) for b in chips)) for a in chips}
        return sum(far[self._chip(self.places[rank])] for rank in group)

    def reach(self, group: Sequence[int]) -> int:
        """How many links there are between the farthest corners of the box around a group."""
        longest = 0
        along = zip(*(self.places[rank] for rank in group), strict=True)
        for places, size, ring in zip(along, self.size, self.wrap, strict=True):
            used = sorted({*places})
            span = used[-1] - used[0]
            if ring:  # the box is on the other side of the longest gap
                gap = max(
                    (b - a) % size or size for a, b in zip(used, [*used[1:], used[0]], strict=True)
                )
                span = min(size - gap, size // 2)
            longest += span
        return longest

    def group_links(self, group: Sequence[int]) -> frozenset[Link]:
        """The links that a collective of a group occupies.

        A group along one axis occupies its row. A group that is a box occupies the links in the
        box. If members are not neighbours, messages pass other ranks and occupy their links too.
        """
        key = tuple(group)
        if key not in self._group_links:
            self._group_links[key] = frozenset(self._ways([self.places[r] for r in group]))
        return self._group_links[key]

    @cached_property
    def _group_links(self) -> dict[tuple[int, ...], frozenset[Link]]:
        return {}  # a cache: many collectives of a program have the same group

    def _ways(self, members: Sequence[Coords]) -> Iterator[Link]:
        """The links of `path` for every pair of members, without walking each path.

        While a message moves along axis i, it has the place of its target on the axes before i,
        and the place of its source on the axes after.
        """
        for axis in range(len(self.size)):
            ends = {place[: axis + 1] for place in members}
            starts = {place[axis:] for place in members}
            for (*before, stop), (start, *after) in product(ends, starts):
                steps = self._steps(axis, start, stop)
                line = ((*before, step, *after) for step in steps)
                yield from (self._link(*step) for step in pairwise(line))

    def ways(self, links: frozenset[Link]) -> tuple[str, ...]:
        """The directions of some links: "axis 0 +", "axis 0 -"; "port" of a switch."""
        if links not in self._directions:
            self._directions[links] = tuple(sorted({self._way(*link) for link in links}))
        return self._directions[links]

    @cached_property
    def _directions(self) -> dict[frozenset[Link], tuple[str, ...]]:
        return {}  # a cache: many transfers occupy the same links

    def _way(self, start: Coords, stop: Coords) -> str:
        for axis, (a, b) in enumerate(zip(start, stop, strict=True)):
            if a != b:  # on a ring, the step from the last place to the first goes ahead
                ahead = (b > a) == (abs(b - a) == 1)
                return f"axis {axis} {'+' if ahead else '-'}"
        return "port"

    def load(self, pairs: Iterable[Sequence[int]]) -> dict[Link, int]:
        """How many of these messages pass each link."""
        load: dict[Link, int] = {}
        for source, target in pairs:
            for link in self.path(source, target):
                load[link] = load.get(link, 0) + 1
        return load
