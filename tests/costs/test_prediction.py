"""`costs.predict`: named machines, the built-in as measured, ours by their schedules."""

import json
import re
from math import prod

import numpy as np
import pytest

from ringcoll import costs
from ringcoll.costs import machines, place_of, predict
from ringcoll.costs.machines import FOLDER, MACHINES

MIB = 2**20


@pytest.mark.parametrize("sides", [(4, 4, 4), (2, 2, 1), (2, 4, 1)])
@pytest.mark.parametrize("collective", ["psum", "psum_scatter", "all_to_all", "ppermute"])
def test_the_built_in_uses_all_axes_of_a_slice_that_ranks_fill(collective, sides):
    in_a_row = place_of(prod(sides), "v5p", network="x".join(map(str, sides)))
    by_sides = predict(collective, 2**26, place_of(sides, "v5p"))
    assert predict(collective, 2**26, in_a_row) == by_sides
    if collective == "psum" and sides == (4, 4, 4):  # a ring of all chips
        by_ring = predict("psum", 2**26, place_of(64, "v5p"), "ring")
        assert predict("psum", 2**26, in_a_row, "ring") == by_ring


def test_axes_of_ranks_may_be_a_part_of_a_slice():
    """An axis along a whole side of 16 is a ring. A shorter axis is a line."""

    def torus(shape, **where):
        return predict("all_gather", 2**28, place_of(shape, "v5e", **where), "torus")

    assert torus((16, 2), network="16x16") == pytest.approx(
        costs.seconds(
            costs.price("all_gather", "torus", (16, 2), (16, 2), (True, False)),
            2**28 / 32,
            costs.DEVICES["v5e"],
        )
    )
    assert torus((4, 2), network="4x4") == torus((4, 2))


def test_aliases_of_machines_networks_and_collectives():
    same = predict("psum", MIB, place_of(4, "v5e"))
    for device in ("v5litepod-4", "v5e-4", "TPU v5 lite", "tpu-v5e"):
        assert predict("psum", MIB, place_of(4, device)) == same
    same = predict("psum", MIB, place_of(8, "h100"))
    for device in ("H100 SXM5", "NVIDIA H100 80GB HBM3", "nvidia-h100"):
        assert predict("all_reduce", MIB, place_of(np.int64(8), device)) == same
    assert predict("pmax", MIB, place_of([1, 8], "h100", hosts=1)) == same


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("all_together", 8, 8, "h100"), "'all_together' is not known; did you mean 'all_gather'?"),
        (("psum", -1, 8, "h100"), "nbytes -1 is not a number of bytes"),
        (("psum", 8, 8, "H100 PCIe"), "no machine is named 'H100 PCIe'"),
        (("psum", 8, 0, "h100"), "ranks 0 is not a number of ranks"),
        (("psum", 8, 8, "h100", "zigzag"), "zigzag"),
        (("all_gather", 8, 6, "h100", "recursive_doubling"), "6"),
        (("ppermute", 8, 8, "h100", "ring"), "a ppermute is one message"),
        (("psum", 8, (2, 2, 2), "v5e"), "v5e has links along 2 axes"),
        (("psum", 8, 8, "missing.json"), "missing.json: No such file"),
        (("psum", 10**400, 8, "h100"), "is not a number of bytes; give 0 or more, up to 2^63"),
        (("psum", 8, 10**9, "v5p"), "a schedule of more than 65536 ranks takes minutes"),
        (("pmax", 8, 8, "v5e", "lax", "float32", "int8"), "pmax has no wire"),
        (("psum", 8, 8, "v5e", "lax", "int4", "int8"), "dtype 'int4' with a wire, which c"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(asked, words):
    collective, nbytes, ranks, device, *others = asked
    with pytest.raises(ValueError, match=re.escape(words)):
        predict(collective, nbytes, place_of(ranks, device), *others)


def test_a_place_is_needed():
    with pytest.raises(ValueError, match=r"place 8 is not a Place; pass place_of\(8, 'h100'\)"):
        predict("psum", 8, 8)


@pytest.mark.parametrize(
    ("device", "where", "words"),
    [
        ("h100", {"network": "8x8"}, "network='8x8': h100 is on no slice; leave it out"),
        ("h100", {"hosts": 3}, "64 ranks do not divide among 3 hosts"),
        ("v5p", {"hosts": 2}, "hosts=2: v5p is on a slice; leave it out"),
        ("h100", {"hosts": "2"}, "hosts='2' is not a number of hosts; give 1 or more"),
        ("v5p", {"network": "8x4"}, "64 ranks do not fit on a slice of 32"),
        ("v5p", {"network": "0x4"}, "network '0x4' is no slice ('4x4'), nor 'switch'"),
        ("v5p", {"network": "switch"}, "the built-in of v5p runs on a slice"),
    ],
)
def test_an_impossible_place_is_refused(device, where, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        predict("psum", 8, place_of(64, device, **where))


def test_every_figure_of_a_machine_has_a_source():
    for path in FOLDER.glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        assert data["name"] == path.stem
        for _, source in data["rates"].values():
            assert len(source) > 10
        for curve in data.get("curves", ()):
            assert curve["source"]
            assert curve["points"] >= 4
        assert path.read_text(encoding="utf-8") == machines.text_of(data)


def test_no_two_machines_have_one_name():
    owners = {}
    for one in MACHINES.values():
        for name in (one.name, *one.aliases):
            plain = "".join(c for c in name.lower() if c.isalnum())
            assert owners.setdefault(plain, one.name) == one.name
