"""Run a schedule message by message in SimGrid: a program of the system's Python.

SimGrid's Python module belongs to the distribution (Debian: python3-simgrid), so this file imports
nothing else but the standard library. It reads a description as JSON from standard input
(`benchmarks.referee.judge` writes it) and prints the seconds until the last rank is done.

A rank starts a round when all messages of its previous round have arrived and all that it sent have
left. Each of its ports starts its messages one after the other; then their bytes share the links
with all other messages (SimGrid: max-min fairness). This file finds routes, shared links and waits
by itself; it takes nothing from a price.
"""

import json
import math
import sys

import simgrid

#: Options that switch off what a price does not have: TCP, acknowledgements, factors of clusters.
PLAIN = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
    "network/weight-S:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "surf/precision:1e-12",
)
DUPLEX = simgrid.Link.SharingPolicy.SPLITDUPLEX
#: SimGrid takes whole numbers of bytes, but shares of a shard are fractions. So bytes are
#: multiplied by this.
PARTS = 1000


class Switched:
    """A network of switches; each rank has one port."""

    def __init__(self, described, ranks):
        self.described, self.ranks, self.places = described, ranks, range(ranks)

    def build(self):
        """Make the hosts and links."""
        callbacks = simgrid.ClusterCallbacks(_host, None, None)
        hop, rate = self.described["hop"], self.described["rate"] * PARTS
        self.zone(callbacks, rate, hop).seal()

    def zone(self, callbacks, rate, hop):
        """The network itself."""
        raise NotImplementedError

    def port(self, rank, target):
        """The port through which a message leaves."""
        return rank


class FatTree(Switched):
    """A fat tree of two levels; a switch has as many links up as it has ranks."""

    def zone(self, callbacks, rate, hop):
        leaves, below = self.described["sizes"]
        params = simgrid.FatTreeParams(2, [below, leaves], [1, below], [1, 1])
        return simgrid.NetZone.create_fatTree_zone(
            "net", None, params, callbacks, rate, hop, DUPLEX
        )


class Dragonfly(Switched):
    """Groups of chassis of routers, with given numbers of links between them."""

    def zone(self, callbacks, rate, hop):
        *sizes, nodes = self.described["sizes"]
        params = simgrid.DragonflyParams(*((n, self.described["links"]) for n in sizes), nodes)
        return simgrid.NetZone.create_dragonfly_zone(
            "net", None, params, callbacks, rate, hop, DUPLEX
        )


class Torus(Switched):
    """A torus or a grid; each rank has a port for each axis and direction.

    Ranks may be on some of its places only.
    """

    def __init__(self, described, ranks):
        super().__init__(described, ranks)
        self.places = described.get("places", self.places)

    def zone(self, callbacks, rate, hop):
        sizes = [*reversed(self.described["sizes"])]  # SimGrid counts the first axis fastest
        return simgrid.NetZone.create_torus_zone("net", None, sizes, callbacks, rate, hop, DUPLEX)

    def port(self, rank, target):
        """The first axis along which a message goes, and its direction: the shorter way."""
        here, there = self.places[rank], self.places[target]
        stride = math.prod(self.described["sizes"])
        for axis, size in enumerate(self.described["sizes"]):
            stride //= size
            ahead = (there // stride - here // stride) % size
            if ahead:
                return rank, axis, 2 * ahead <= size
        raise SystemExit(f"rank {rank} sends to itself")


def _host(zone, _coordinates, number):
    """SimGrid calls this for each place of a network."""
    host = zone.create_host(str(number), "1Gf")
    host.seal()
    return host.netpoint, None


NETWORKS = {"torus": Torus, "fat_tree": FatTree, "dragonfly": Dragonfly}


def step(shape, rank, axis, shift):
    """The rank that is `shift` ahead along an axis; ranks are numbered row-major."""
    stride = 1
    for size in shape[axis + 1 :]:
        stride *= size
    digit = rank // stride % shape[axis]
    return rank + ((digit + shift) % shape[axis] - digit) * stride


def planned(data, network):
    """For each round: how often it runs, what every rank sends and when, and what it gets."""
    rounds = []
    for phase in data["phases"]:
        adding = data["addition"] if phase["adds"] else 0.0
        for times, moves in phase["rounds"]:
            starts: dict = {}
            sent: list[list] = [[] for _ in range(network.ranks)]
            got: list[list] = [[] for _ in range(network.ranks)]
            for axis, shift, size, start in moves:
                for rank in range(network.ranks):
                    target = step(phase["shape"], rank, axis, shift)
                    port = network.port(rank, target)
                    starts[port] = starts.get(port, 0.0) + start
                    sent[rank].append((port, target, size))
                    got[target].append((rank, size))
            after = [
                sorted((starts[port], target, size) for port, target, size in messages)
                for messages in sent
            ]
            rounds.append((times, after, got, adding))
    return rounds


def act(engine, rounds, rank, ended):
    """What one rank does, from its first round to its last."""
    sleep, box = simgrid.this_actor.sleep_for, engine.mailbox_by_name_or_create
    for times, sent, got, adding in rounds:
        sources = [box(f"{source} {rank}") for source, _ in got[rank]]
        out = [(start, box(f"{rank} {to}"), round(size * PARTS)) for start, to, size in sent[rank]]
        additions = adding * sum(size for _, size in got[rank])
        for _ in range(times):
            coming = [source.get_async() for source in sources]  # kept until they have arrived
            messages, slept = [comm for comm, _ in coming], 0.0
            for start, target, size in out:
                if start > slept:
                    sleep(start - slept)
                    slept = start
                messages.append(target.put_async(0, size))
            simgrid.Comm.wait_all(messages)
            if additions:
                sleep(additions)
    ended.append(engine.clock)


def run(data):
    """The seconds until the last rank is done."""
    engine = simgrid.Engine(
        ["simulator", "--log=root.thres:error", *(f"--cfg={one}" for one in PLAIN)]
    )
    network = NETWORKS[data["network"]["kind"]](data["network"], data["ranks"])
    rounds, ended = planned(data, network), list[float]()
    network.build()
    places = {place.name: place for place in engine.all_hosts}
    for rank, number in enumerate(network.places):
        simgrid.Actor.create(str(rank), places[str(number)], act, engine, rounds, rank, ended)
    engine.run()
    if len(ended) < network.ranks:
        raise SystemExit("ranks wait for messages that never come")
    return max(ended)


if __name__ == "__main__":
    print(repr(run(json.load(sys.stdin))))
