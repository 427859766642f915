"""The benchmark of sharded layers: its programs agree and compile, and wrong ones are seen."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support import check_doubling, doubling_times, make_mesh

from benchmarks.__main__ import main
from benchmarks.compiled import fsdp, stack
from benchmarks.compiled.programs import COMPILER, PLAIN
from benchmarks.measuring import side_by_side

SHAPE = "3x8x64x96"
MEASURED = ["fsdp", "--shape", SHAPE, "-g", "4", "-n", "3"]
TOLERANCE = fsdp.tolerance(SHAPE, 4)


@pytest.mark.exhaustive
def test_stacks_are_compared_and_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(side_by_side, "interleave", doubling_times)
    path = tmp_path / "json"
    ours = [*stack.OURS]
    chosen = ["--algorithm", ",".join(["plain/tuned", COMPILER, *ours]), "-J", str(path)]
    assert main([*MEASURED, *chosen]) == 0
    rows = json.loads(path.read_text())["rows"]
    check_doubling(rows, capsys.readouterr().out)
    names = [PLAIN, COMPILER, *ours]
    assert [row["algorithm"] for row in rows] == [*names, *names]
    assert [row["kept"] for row in rows] == ["nothing"] * 5 + ["products"] * 5
    assert max(row["error"] for row in rows) < TOLERANCE < 1e-4


def test_a_wrong_stack_is_seen(monkeypatch, capsys):
    right = stack.fsdp.linear
    monkeypatch.setattr(stack.fsdp, "linear", lambda *of, **options: right(*of, **options) * 1.001)
    chosen = ["--kept", "nothing", "--algorithm", "compiler,linear"]
    assert main([*MEASURED, *chosen]) == 1
    *_, by_shardings, ours, _, _ = capsys.readouterr().out.split("\n")
    assert float(by_shardings.split()[-1]) < TOLERANCE < float(ours.split()[-1])


@pytest.mark.parametrize("kept", stack.POLICIES)
def test_plain_is_right(kept):
    """The other programs are compared with plain. It is compared with a loop in float64."""
    function, (x, weights) = stack.stack(SHAPE, kept, PLAIN, make_mesh(4), jnp.float32)
    rng = np.random.default_rng(1)
    values = {
        name: rng.standard_normal(of.shape) / of.shape[-2] ** 0.5 for name, of in weights.items()
    }
    y = start = rng.standard_normal(x.shape)
    for gate, up, down in zip(*(values[name] for name in ("gate", "up", "down")), strict=True):
        y = y + (y @ gate / (1 + np.exp(-y @ gate)) * (y @ up)) @ down
    mine = function(jnp.float32(start), {name: jnp.float32(of) for name, of in values.items()})
    np.testing.assert_allclose(mine, y, rtol=0, atol=TOLERANCE * np.abs(y).max())
