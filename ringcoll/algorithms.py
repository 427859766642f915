"""The library of schedules: each algorithm is one function that returns its list.

A ring is nine lines of `ppermute` and `axis_index`:

    def all_gather_matmul(x, w):  # inside jax.shard_map
        n, r = lax.axis_size("x"), lax.axis_index("x")
        right = [(i, (i + 1) % n) for i in range(n)]
        parts = []
        for _ in range(n):
            arriving = lax.ppermute(x, "x", right)  # the next shard travels
            parts.append(x @ w)  # while this one is multiplied
            x = arriving  # after t hops it is rank r - t's
        return jnp.stack(parts)[(r - jnp.arange(n)) % n].reshape(-1, w.shape[1])

An algorithm is what `right` and the loop say, as a list of rounds. Round by round (t = 0, 1, ...),
every rank sends to the next one (shift 1) the shard that came from t ranks before it (offset t):

    Schedule((n,), tuple((Move(1, (t,)),) for t in range(n - 1)))

The list does not say what is done with a shard: `ringcoll.runtime.run` runs it, and hands each
shard that arrives to a visit. (The nine lines send once more than the list; nobody uses what
arrives last.)

An algorithm takes the sizes of the axes that it runs over, major first: `ring(8)`, `ring(4, 2)`.
Most are written for one axis. On several axes, `product` gathers along the first axis, then gathers
the result along the next. To add an algorithm, write the function under the decorator of its
kind. It is then executed, proved, priced, drawn, explained, tested and benchmarked. Its docstring
has a first line, `When:`, and `Source:` if it was published.

A list cannot say everything. In a move, all ranks send by the same shift, so an algorithm in which
ranks do different things has no list: Swing, whose even ranks send ahead when odd ranks send back,
or a tree that broadcasts from one rank. (`pbroadcast` is an all-reduce in which only the source
contributes nonzero bits.)

`n` is the size of an axis; all shifts and offsets are modulo `n`.
"""

from ringcoll.schedules.registry import ALIASES as ALIASES
from ringcoll.schedules.registry import ALL_REDUCES as ALL_REDUCES
from ringcoll.schedules.registry import (
    ALL_TO_ALLS,
    GATHERS,
    STAGED,
    Stages,
    along_each_axis,
    listed,
)
from ringcoll.schedules.registry import COLLECTIVES as COLLECTIVES
from ringcoll.schedules.registry import ScheduleLike as ScheduleLike
from ringcoll.schedules.registry import build as build
from ringcoll.schedules.registry import in_lax as in_lax
from ringcoll.schedules.registry import listed_name as listed_name
from ringcoll.schedules.registry import names as names
from ringcoll.schedules.schedule import (
    AllToAllSchedule,
    Move,
    Schedule,
    SizeError,
    in_lanes,
    product,
)


@listed(GATHERS)
@along_each_axis
def ring(n: int, *, direction: int = 1) -> Schedule:
    """Send the shard that arrived last to the next rank: n-1 rounds of one shard.

    It sends the fewest bytes, and only to neighbours. All messages travel in one direction.

    When: large payloads, neighbours only.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009).

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.ring(4).numbered_moves()]
    [(1, 1, (0,)), (2, 1, (1,)), (3, 1, (2,))]
    """
    rounds = ((Move(direction, (direction * t % n,)),) for t in range(n - 1))
    return Schedule((n,), tuple(rounds))


@listed(GATHERS)
@along_each_axis
def bidirectional_ring(n: int) -> Schedule:
    """Half of each shard travels in each direction: n-1 rounds of half a shard per direction.

    Both directions of every link are busy all the time.

    When: large payloads, half of the bytes each way.

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.bidirectional_ring(3).numbered_moves()]
    [(1, 1, (0,)), (1, -1, (0,)), (2, 1, (1,)), (2, -1, (2,))]
    """
    return in_lanes(ring(n), ring(n, direction=-1))


@listed(GATHERS)
@along_each_axis
def two_ended(n: int) -> Schedule:
    """Whole shards travel in both directions and meet: ceil((n-1)/2) rounds.

    It has half as many rounds as a bidirectional ring, each with twice the bytes.

    When: a physical ring: half the rounds.

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.two_ended(4).numbered_moves()]
    [(1, 1, (0,)), (1, -1, (0,)), (2, 1, (1,))]
    """
    ahead = [Move(1, (t,)) for t in range(n // 2)]
    back = [Move(-1, (-t % n,)) for t in range((n - 1) // 2)]
    rounds = (tuple(m[t] for m in (ahead, back) if t < len(m)) for t in range(n // 2))
    return Schedule((n,), tuple(rounds))


@listed(GATHERS)
@along_each_axis
def bruck(n: int) -> Schedule:
    """Every round doubles the shards that a rank holds: ceil(log2 n) rounds, for any n.

    When: small payloads, any n, a switch.

    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", IEEE TPDS 8 (1997).

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.bruck(6).numbered_moves()]
    [(1, 1, (0,)), (2, 2, (0, 1)), (3, 4, (0, 1))]
    """
    steps = [2**k for k in range((n - 1).bit_length())]
    return Schedule((n,), tuple((Move(s, tuple(range(min(s, n - s)))),) for s in steps))


@listed(GATHERS, all_reduce="halving_doubling")
@along_each_axis
def recursive_doubling(n: int) -> Schedule:
    """Exchange all shards with the rank n/2, ..., 2, 1 away: log2 n rounds.

    The farthest partner is the first, while there is least to send. Backward it is recursive
    halving. Both together are Rabenseifner's all-reduce, `halving_doubling`.

    When: small payloads, a switch, n a power of two.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).

    Raises:
        SizeError: n is not a power of two.

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.recursive_doubling(4).numbered_moves()]
    [(1, 1, (0,)), (2, 1, (0, 2))]
    """
    if n & (n - 1):
        raise SizeError(
            f"recursive halving and doubling need a power of two, got {n} ranks; "
            "use algorithm='bruck', which takes as few rounds for any number"
        )
    return product([ring(2)] * (n.bit_length() - 1) or [ring(1)])


@listed(GATHERS)
@along_each_axis
def direct(n: int) -> Schedule:
    """Send every shard to every rank at once: one round of n-1 messages.

    Backward, raw contributions travel, and only the rank that keeps the sum adds. So with a
    wide `accumulate_dtype` messages stay narrow, and the sum is rounded once.

    When: wide sums of narrow messages.

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.direct(4).numbered_moves()]
    [(1, 1, (0,)), (1, 2, (0,)), (1, 3, (0,))]
    """
    everybody = tuple(Move(s, (0,)) for s in range(1, n))
    return Schedule((n,), (everybody,) if everybody else ())


@listed(GATHERS)
def torus(*shape: int) -> Schedule:
    """Use every axis in both directions at once: two lanes per axis, each with its own order.

    The two lanes of axis i start along that axis, in opposite directions. So no link of a
    square torus is idle. On one axis this is the bidirectional ring.

    When: large payloads, several axes: all links, both ways.

    Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on
    torus interconnects", Int. Conf. on Supercomputing (2010).

    >>> [(m.axis, m.shift) for m in algorithms.torus(4, 4).rounds[0]]  # a move in each lane
    [(0, 1), (0, -1), (1, 1), (1, -1)]
    """
    used = [axis for axis, n in enumerate(shape) if n > 1] or [0]  # an axis of one has no link
    ones = [axis for axis in range(len(shape)) if axis not in used]
    orders = [[*used[first:], *used[:first], *ones] for first in range(len(used))]
    lanes = [(order, direction) for order in orders for direction in (1, -1)]
    return in_lanes(*(product([ring(n, direction=d) for n in shape], o) for o, d in lanes))


@listed(GATHERS)
def hamiltonian(*shape: int) -> Schedule:
    """Send what arrived last along a path through all axes: n-1 rounds of one shard.

    Each lane sends equally much in every round. Its path goes around one axis, takes a step along
    the next, and goes around again. On a square torus no link is idle; on one axis it is a
    bidirectional ring.

    When: a matmul hides it, several axes: all links, both ways.

    >>> [move.axis for (move, *others) in algorithms.hamiltonian(2, 2).rounds]
    [0, 1, 0]
    """
    lanes, step = [], Schedule(shape, ()).step
    of_twos = len(shape) > 1 and max(shape) == 2  # between two ranks both directions are one link
    for first in range(len(shape)):
        path: tuple[int, ...] = ()  # along which axis each round goes
        for axis in (*range(first, len(shape)), *range(first)):
            path = ((*path, axis) * shape[axis])[:-1]
        for way in (1,) if of_twos else (1, -1):
            offset, rounds = 0, list[tuple[Move]]()
            for axis in path:
                rounds.append((Move(way, (offset,), axis),))
                offset = step(offset, axis, way)
            lanes.append(Schedule(shape, tuple(rounds)))
    return in_lanes(*lanes)


@listed(STAGED, "recursive_doubling")
def recursive_doubling_all_reduce(*shape: int) -> Stages:
    """Exchange whole vectors and add, along each factor 2 of n and then along its odd part.

    It takes ceil(log2 n) rounds for any n, and sends k + m - 1 vectors for n = 2^k m with m
    odd. Every stage adds in the order of the ranks, so all ranks hold the same bits.

    When: a few kilobytes, where only the rounds count.

    Source: for n = 2^k Thakur, Rabenseifner and Gropp, as for the gather of this name (2005).

    >>> [stage.size for stage in algorithms.recursive_doubling_all_reduce(12)]
    [2, 2, 3]
    """
    twos = [(n & -n).bit_length() - 1 for n in shape]
    return tuple(
        stage
        for n, k in zip(shape, twos, strict=True)
        for stage in [ring(2)] * k + ([bruck(n >> k)] if n >> k > 1 else [])
    )


@listed(STAGED)
def one_shot(*shape: int) -> Stages:
    """Gather every whole vector, then add once: ceil(log2 n) rounds, n-1 vectors of bytes.

    The rounding error is that of one sum, for any n.

    When: small payloads, the error of one sum.

    >>> [stage.size for stage in algorithms.one_shot(4, 3)]
    [4, 3]
    """
    return tuple(bruck(n) for n in shape if n > 1)


@listed(ALL_TO_ALLS)
@along_each_axis
def pairwise(n: int) -> AllToAllSchedule:
    """Send each block straight to its rank: n-1 rounds of one block.

    When: large blocks.

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.pairwise(4).numbered_moves()]
    [(1, 1, (1,)), (2, 2, (2,)), (3, 3, (3,))]
    """
    return AllToAllSchedule((n,), tuple((Move(s, (s,)),) for s in range(1, n)))


@listed(ALL_TO_ALLS, "bruck")
@along_each_axis
def bruck_all_to_all(n: int) -> AllToAllSchedule:
    """A block for r + d travels by the binary digits of d: ceil(log2 n) rounds.

    Each round sends about n/2 blocks: fewer messages, more bytes.

    When: small blocks.

    Source: Bruck et al., as for the all-gather (1997).

    >>> [(r, m.shift, m.offsets) for r, m in algorithms.bruck_all_to_all(4).numbered_moves()]
    [(1, 1, (1, 3)), (2, 2, (2, 3))]
    """
    steps = [2**k for k in range((n - 1).bit_length())]
    rounds = ((Move(s, tuple(d for d in range(n) if d & s)),) for s in steps)
    return AllToAllSchedule((n,), tuple(rounds))
