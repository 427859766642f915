"""The benchmark of a transformer block: its programs agree, and wrong ones are seen."""

import json

import pytest
from support import check_doubling, doubling_times

from benchmarks.__main__ import main
from benchmarks.compiled import block, layers
from benchmarks.compiled.programs import COMPILER, PLAIN
from benchmarks.measuring import side_by_side

SHAPE = "1x16x16x4x4x32"
MEASURED = ["layers", "--shape", SHAPE, "-g", "4", "-n", "3", "--mesh", "data=2,model=2"]


@pytest.mark.exhaustive
def test_blocks_are_compared_and_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(side_by_side, "interleave", doubling_times)
    path = tmp_path / "json"
    chosen = ["--algorithm", "plain/tuned,compiler,ring,auto+exchange"]
    assert main([*MEASURED, "--mesh", "model=2,inner=2", *chosen, "-J", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    check_doubling(rows, capsys.readouterr().out)
    names = [PLAIN, COMPILER, "ring", "auto+exchange"]
    assert [row["algorithm"] for row in rows] == [*names, *names[:-1]]  # without data, no sum
    assert max(row["error"] for row in rows) < layers.TOLERANCE


def test_a_wrong_block_is_seen(monkeypatch, capsys):
    right = block.tp.gated_mlp
    monkeypatch.setattr(block.tp, "gated_mlp", lambda *of, **options: right(*of, **options) * 1.001)
    assert main([*MEASURED, "--direction", "forward", "--algorithm", "compiler,ring"]) == 1
    *_, by_shardings, ours, _, _ = capsys.readouterr().out.split("\n")
    assert float(by_shardings.split()[-1]) < layers.TOLERANCE < float(ours.split()[-1])


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(SystemExit, match="none of data=2,model=2 is of the 8 devices"):
        main(["layers", "--mesh", "data=2,model=2"])
