"""Several processes compute as one: all ranks have NumPy's results, in the bits of one process."""

from functools import lru_cache

import numpy as np
import pytest
import spread
from processes import together

ALL_REDUCES = ("psum ", "pmean ", "pmax ", "pmin ", "sum on every rank ")
#: Sums that gloo adds in its own order, or that are added in another order between hosts.
ADDED_OTHERWISE = ("psum lax", "pmean lax", "psum_scatter lax", "psum by hosts")

in_one_process = lru_cache(spread.held)


def over_processes(devices, folder):
    """`spread.held` of all ranks, from what each process has written."""
    together(devices, "tests/spread.py", folder)
    parts = []
    for i, own in enumerate(devices):
        with np.load(folder / f"{i}.npz") as saved:
            parts.append(dict(saved))
        assert {leaf.shape[1] for leaf in parts[-1].values()} == {own}
        assert (folder / f"{i}.txt").read_text(encoding="utf-8") == chosen(own)
    return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}


def chosen(own):
    """The right output of `spread.chosen`."""
    lines = [f"psum over {axes}: recursive_doubling" for axes in ("x", "('x', 'y')")]
    return "\n".join([*lines, *["psum over y: direct"] * (own > 1)])


@pytest.mark.exhaustive  # each process compiles all
@pytest.mark.parametrize(
    "devices", [[1, 1], [1, 1, 1], [2, 2]], ids=lambda own: "+".join(map(str, own))
)
def test_processes_compute_as_one(devices, tmp_path):
    n = sum(devices)
    found, of_one = over_processes(devices, tmp_path), in_one_process(n)
    assert found.keys() == of_one.keys()
    for part, (exact, *real) in found.items():
        np.testing.assert_array_equal(exact, of_one[part][0], part)
        bits = real[0] if part.startswith(ADDED_OTHERWISE) else of_one[part][1]
        for again in real:
            np.testing.assert_array_equal(again, bits, f"{part}: other bits")
    operands = spread.operands(n, spread.exact)
    for name, program in spread.programs(n).items():
        exact, *real = found[f"{name}, 0"]
        if program.right:
            np.testing.assert_array_equal(exact, program.right(*operands[name]), name)
        if name.startswith(ALL_REDUCES):
            for rank in real[0]:
                np.testing.assert_array_equal(rank, real[0][0], f"{name}: ranks differ")
