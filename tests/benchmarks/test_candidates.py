"""Where the model prices a collective of ours below the built-in."""

import pytest

from benchmarks.__main__ import main
from benchmarks.collectives import candidates
from benchmarks.compiled import collectives
from ringcoll import costs
from ringcoll.collectives.table import default_table


def test_a_gain_is_that_of_the_fastest(capsys):
    given = ["--device", "v5p", "--ranks", "2x2x2", "--bytes", "64M"]
    assert main(["candidates", *given]) == 0
    printed = capsys.readouterr().out
    call = "psum_scatter", 2**26, (2, 2, 2), "v5p"
    gain = costs.predict(*call) / costs.predict(*call, algorithm="torus")
    assert gain > 1.5
    assert f"{gain:.2f}" in printed
    assert "torus" in printed
    flags = {"bytes": "64M", "ranks": "2x2x2", "device": "v5p", "collective": "psum_scatter"}
    built_in, ours = (candidates.seconds_of(**flags, algorithm=a) for a in ("lax", "all"))
    assert built_in / ours == gain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "4y4"], "is not a shape"),
        (["--device", "v9"], "no machine is named 'v9'"),
        (["--ranks", "3", "--algorithm", "recursive_doubling"], "need a power of two"),
    ],
)
def test_calls_that_cannot_be_priced_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["candidates", *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_auto_stays_the_built_in_where_no_gain_is_known():
    for platform in ("tpu", "gpu"):
        for collective in candidates.COLLECTIVES:
            for ranks in (2, 8, 16):
                for nbytes in (2**10, 2**26):
                    call = collective, platform, ranks, nbytes, "float32", "0.12.0"
                    assert default_table().pick(*call) == "lax"


def test_the_compiled_operand_is_of_so_many_bytes(monkeypatch):
    from support import make_mesh

    monkeypatch.setattr(collectives.overlap, "mesh", lambda topology, **axes: make_mesh(4, 2))
    _, (operand,) = collectives.program_of("v5e:4x2", "4x2", "psum_scatter", "1M", "ring")
    assert operand.size * 4 == 8 * 2**20
