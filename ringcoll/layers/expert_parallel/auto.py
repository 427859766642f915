"""The seconds of a mixture of experts by each algorithm that brings tokens to experts."""

from dataclasses import dataclass

from ringcoll.choose import under_work as auto
from ringcoll.costs.machines import KINDS
from ringcoll.costs.model import Model, links, scatter_links
from ringcoll.costs.under_work import all_to_all_seconds

#: The names of algorithms in `ringcoll.layers.expert_parallel.moe`.
GATHER, RAGGED, RINGS = "gather", "ragged_all_to_all", {"ring": 1, "bidirectional_ring": 2}


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture: each of `ranks` ranks has `tokens` tokens and `experts` experts.

    An expert is a gated MLP with sizes d and f. Each token goes to `top_k` experts. Numbers have
    `itemsize` bytes.
    """

    ranks: int
    tokens: int
    experts: int
    top_k: int
    d: int
    f: int
    itemsize: int

    @property
    def block(self) -> int:
        """The bytes of a rank's tokens."""
        return self.tokens * self.d * self.itemsize

    @property
    def is_known(self) -> bool:
        """Whether there are tokens, and no size is symbolic."""
        sizes = (self.tokens, self.d, self.f)
        return all(isinstance(size, int) for size in sizes) and self.tokens > 0

    def compute(self, model: Model, share: float) -> float:
        """Seconds of the FLOPs of a share of the matmuls."""
        return 6.0 * self.tokens * self.top_k * self.d * self.f * share * model.delta

    def reading(self, model: Model) -> float:
        """Seconds that a rank takes to read the weights of its experts."""
        return 3.0 * self.experts * self.d * self.f * self.itemsize * model.far

    def work(self, model: Model, share: float) -> float:
        """Seconds of a share of the matmuls if all experts get equally many tokens.

        It is at least the time to read the weights.
        """
        return max(self.compute(model, share), self.reading(model))

    def around(self, model: Model, hop: float) -> float:
        """Seconds of a ring: n-1 rounds that send a block and a sum, and a first and a last round.

        A hop of a block and a sum takes `hop` seconds; a hop of only one of them takes half.
        """
        ends = 2 * max(hop / 2, self.work(model, 0.5 / self.ranks))
        return ends + (self.ranks - 1) * max(hop, self.work(model, 1 / self.ranks))


def seconds(mixture: Mixture, device_kind: str) -> dict[str, float]:
    """Seconds of the layer's forward pass on TPUs by algorithm, without routing.

    Built-in collectives use all links of a chip; rings use one link in each direction.

    >>> from ringcoll.layers.expert_parallel.auto import Mixture, seconds
    >>> few = Mixture(ranks=8, tokens=128, experts=8, top_k=8, d=4096, f=1536, itemsize=2)
    >>> print({name: round(1e6 * t) for name, t in seconds(few, "TPU v6 lite").items()})
    {'gather': 310, 'ragged_all_to_all': 344, 'ring': 1973, 'bidirectional_ring': 1973}
    """
    n, model = mixture.ranks, auto.machine(device_kind)
    products, sent = mixture.work(model, 1), (n - 1) * model.beta * mixture.block
    inward, outward = links(n, model), scatter_links(n, model)
    found = {GATHER: products + 2 * model.alpha + sent / inward + sent / outward}
    rows = all_to_all_seconds(mixture.top_k * mixture.block, n, model)
    found[RAGGED] = products + 2 * (model.alpha + rows)
    for name, ways in RINGS.items():
        hop = 2 * (model.latency + model.beta * mixture.block / ways)
        found[name] = mixture.around(model, hop)
    return found


def fastest(mixture: Mixture, device_kind: str | None) -> str:
    """The algorithm that is fastest by the model; "gather" if the model does not apply.

    The model applies to TPUs, and not to symbolic sizes.

    >>> from ringcoll.layers.expert_parallel.auto import Mixture, fastest
    >>> many = Mixture(ranks=8, tokens=8192, experts=8, top_k=8, d=4096, f=4096, itemsize=2)
    >>> fastest(many, "TPU v6 lite")
    'bidirectional_ring'
    """
    if mixture.ranks == 1 or not mixture.is_known or not device_kind or device_kind not in KINDS:
        return GATHER
    priced = seconds(mixture, device_kind)
    return min(priced, key=lambda name: priced[name])


def halves_pay(mixture: Mixture, device_kind: str | None) -> bool:
    """Whether the experts multiply the two halves of a round of a ring separately, on TPUs.

    Joining two halves, and splitting their sums, copies rows. Multiplied separately, each half
    reads the weights. That pays if reading takes less time than the products of a half. (Compiled
    with gradients, 8192 tokens that go to 8 of 64 experts, all sizes 4096: v5p:2x2x4 takes 66555 us
    joined, 62312 separately; v6e:4x2, where reading takes longer, 49430 joined, 54487 separately.)

    >>> from ringcoll.layers.expert_parallel.auto import Mixture, halves_pay
    >>> many = Mixture(ranks=16, tokens=8192, experts=4, top_k=8, d=4096, f=4096, itemsize=2)
    >>> halves_pay(many, "TPU v5p")
    True
    """
    if device_kind not in KINDS or not mixture.is_known:
        return False
    model = auto.machine(device_kind)
    return mixture.compute(model, 0.5 / mixture.ranks) > mixture.reading(model)
