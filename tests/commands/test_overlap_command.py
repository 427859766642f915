"""The command `overlap`: its last line, and bad arguments, which are refused in a line.

All commands run in one process of their own, because a process takes seconds to make a topology.
"""

import json
import re
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from hlo_texts import CHIP, blocking, program
from support import python

from ringcoll import overlap

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
    ),
]

USERS_OWN = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def operand(mesh, rows=1024):
    spec = NamedSharding(mesh, P("x", None))
    return jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16, sharding=spec)

def plain(mesh):
    def step(x, w):
        full = lax.all_gather(x, "x", tiled=True)
        return full @ w
    specs = P("x", None), P()
    whole = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False), (
        operand(mesh), whole)

def nothing(mesh):
    return None

def nothing_compiled(mesh):
    return lambda x: None, (operand(mesh),)

def compiled(mesh):
    return jax.jit(lambda x: x + 1).lower(operand(mesh)).compile()

def too_few(mesh):
    return lambda x, y: x @ y, (operand(mesh),)

def not_sharded(mesh):
    return lambda x: x, (jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),)

def elsewhere(mesh):
    return lambda x: x + 1, (operand(Mesh(jax.devices("cpu")[:1], ("x",))),)

def one_device(mesh):
    return lambda x: x @ x.T, (operand(mesh),)
"""


#: Runs the command with each list of arguments; a traceback would end it.
TYPIST = """
import contextlib, io, json, sys
from ringcoll.__main__ import main

for arguments in json.load(open(sys.argv[1])):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                status = main(["overlap", *arguments])
            except SystemExit as ended:
                status = ended.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""

REFUSED = [
    ("--topology v4:2x2x1", "--topology v4:2x2x1: the constants of this chip are not known, on"),
    ("--topology v5e:0x2", "'v5e:0x2' must be a kind of chip and a size, such as v5e:4x2"),
    ("--topology v5e", "'v5e' must be a kind of chip and a size, such as v5e:4x2 or v5e:8"),
    ("--topology v5e:6", "'v5e:6' must be a power of two; name such as v5e:4x2"),
    ("--against own:plain", "'own:plain' is no report that --json wrote: No such file or direc"),
    ("--topology v9:4x2", "has no topology 'v9:4x2' "),
    ("--mesh x=4,x=2", "'x=4,x=2' names an axis twice; write x=4,y=2"),
    ("--mesh x=4,y=3", "are 12 devices, but v5e:4x2 has 8; let the sizes multiply to that"),
    ("--mesh 4x2", "'4x2' is not a mesh; write x=4,y=2"),
    ("--constant lnk=3", "'lnk' is not one of clock, link, flops, hbm, hop"),
    ("--constant link=fast", "'link=fast': 'fast' is not a number above 0"),
    ("--option foo=bar", "No such compile option: 'foo'; --option foo=bar: give an option and"),
    ("--option foo", "'foo' is not an option with a value; write NAME=VALUE"),
    ("--max-exposed nan", "--max-exposed=nan is not between 0 and 1; pass such as 0.05"),
    ("--function own:nothing", "nothing returned None; return a function and a tuple of its oper"),
    ("--function own:nothing_compiled", "it returns no array, so nothing is compiled; return"),
    ("--function own:compiled", "return a function and a tuple of its operands"),
    ("--function own:too_few", "missing 1 required positional argument: 'y'; let --function"),
    ("--function own:not_sharded", "no operand is sharded over a mesh; give jax.ShapeDtypeSt"),
    ("--function own:elsewhere", "which is not one of the 8 devices of v5e:4x2"),
]
PLAIN = "--function own:plain"
ALONE = "--function own:one_device --topology v5e:1x1 --max-exposed 0.05"
EXAMPLE = "--example all_gather_matmul"
SAVED = "saved.json --against saved.json"
REFUSALS = [f"{'' if 'own' in one else PLAIN} {one}" for one, _ in REFUSED]
TYPED = [PLAIN, ALONE, EXAMPLE, SAVED, *REFUSALS]


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> list:
    """Exit status, output and errors of each command."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(USERS_OWN, encoding="utf-8")
    saved = str(folder / "saved.json")
    (folder / "saved.json").write_text(
        overlap.report(program(blocking("all-reduce")), chip=CHIP).to_json()
    )
    asked = [one.replace("saved.json", saved).split() for one in TYPED]
    (folder / "typed.json").write_text(json.dumps(asked))
    done = python("-c", TYPIST, str(folder / "typed.json"), path=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_report_names_lines_and_says_what_to_change(typed):
    status, printed, _ = typed[0]
    assert status == 0
    *_, last = printed.splitlines()
    assert last == (
        "to change first: own.py:12 all_gather; if a matmul takes it: `all_gather_matmul`"
    )
    row = printed.splitlines()[3]
    assert row.endswith("  1  all-gather  own.py:12 all_gather")
    assert f"libtpu {version('libtpu')}" in printed


def test_an_example_and_a_saved_report_are_compared(typed):
    """With its plain form; and a report with itself."""
    (_, example, _), (_, saved, _) = typed[2:4]
    *_, last = example.splitlines()
    assert re.fullmatch(r"before: .* \([1-9].*%\); now: .* \(0.*%\), 1.* times as fast", last)
    assert "all_gather_matmul, 8 rounds" in example
    assert "\n1 line as before\nbefore: 750 of 750 us exposed (100.0%); now: " in saved


def test_no_collective_fails_where_something_is_limited(typed):
    status, _, printed = typed[1]
    assert status == 1
    assert "has 0 collectives that send anything, fewer than min_collectives=1" in printed


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: REFUSED[number][0])
def test_bad_input_is_refused_in_a_line(typed, number):
    status, out, err = typed[4 + number]
    assert (status, out) == (2, "")
    assert REFUSED[number][1] in err.splitlines()[-1]


def test_a_process_ends_with_the_status_and_no_traceback():
    done = python("-m", "ringcoll", "overlap", "--example", "ring_matmul", "--topology", "v4:2x2x1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not done.stdout
