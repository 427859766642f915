"""The command `overlap`: its last line, and bad arguments, which are refused in a line.

All commands run in one process of their own, because a process takes seconds to make a topology.
"""

import json
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from support import python

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
    ("--topology v5e", "'v5e' must be a kind of chip and a size, such as v5e:4x2"),
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
TYPED = [PLAIN, ALONE, *(f"{'' if 'own' in one else PLAIN} {one}" for one, _ in REFUSED)]


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> list:
    """Exit status, output and errors of each command."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(USERS_OWN, encoding="utf-8")
    (folder / "typed.json").write_text(json.dumps([one.split() for one in TYPED]))
    done = python("-c", TYPIST, str(folder / "typed.json"), path=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_last_line_says_what_to_change_and_where(typed):
    status, printed, _ = typed[0]
    assert status == 0
    *_, line = printed.splitlines()
    assert line.startswith("to change first: gather, then multiply at own.py:12: "), line
    assert "; `all_gather_matmul` would take at best " in line
    heads, row = printed.splitlines()[1:3]
    assert heads.startswith("at ")
    assert row.startswith("own.py:12 all_gather  all-gather")
    assert f"libtpu {version('libtpu')}" in printed


def test_no_collective_fails_where_something_is_limited(typed):
    status, _, printed = typed[1]
    assert status == 1
    assert "has 0 collectives that send anything, fewer than min_collectives=1" in printed


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: REFUSED[number][0])
def test_bad_input_is_refused_in_a_line(typed, number):
    status, out, err = typed[2 + number]
    assert (status, out) == (2, "")
    assert REFUSED[number][1] in err.splitlines()[-1]


def test_a_process_ends_with_the_status_and_no_traceback():
    done = python("-m", "ringcoll", "overlap", "--example", "ring_matmul", "--topology", "v4:2x2x1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not done.stdout
