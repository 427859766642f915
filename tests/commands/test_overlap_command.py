"""The command `overlap`: what it prints and writes, its status, and what it refuses in a line.

What needs the TPU compiler runs in one process, because a process takes seconds to make a topology.
"""

import json
import re
import shlex
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest
from hlo_texts import CHIP, blocking, program
from support import assert_same, data, make_mesh, per_rank, python

from ringcoll import overlap
from ringcoll.commands.overlap_examples import ring_matmul

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

def unsharded(mesh):
    step, operands = plain(mesh)
    return step, tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands)

def of_no_mesh(mesh):
    return lambda x: x + 1, (jax.ShapeDtypeStruct((8,), jnp.float32),)

def nothing_compiled(mesh):
    return lambda x: None, (operand(mesh),)

def compiled(mesh):
    return jax.jit(lambda x: x + 1).lower(operand(mesh)).compile()

def too_few(mesh):
    return lambda x, y: x @ y, (operand(mesh),)

def raises(mesh):
    return {}[mesh.size]

def does_not_trace(mesh):
    return lambda x: x @ jnp.ones((3, 3)), (operand(mesh),)

def elsewhere(mesh):
    return lambda x: x + 1, (operand(Mesh(jax.devices("cpu")[:1], ("x",))),)
"""


#: Runs the command with each list of arguments; a traceback would end it.
TYPIST = """
import contextlib, io, json, runpy, sys

for arguments in json.load(open(sys.argv[1])):
    sys.argv[1:] = ["overlap", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                runpy.run_module("ringcoll", run_name="__main__")
            except SystemExit as ended:
                status = ended.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def test_the_ring_of_the_examples_is_a_gather_and_a_product():
    x, w = data((4, 2, 3)), data((4, 3, 5))
    expected = np.stack([x.reshape(8, 3) @ of_rank for of_rank in w])
    assert_same(per_rank(make_mesh(4), ring_matmul, x, w), expected)


VMEM = "--options xla_tpu_scoped_vmem_limit_kib"
#: Refused by the compiler or by what was compiled for.
NOT_COMPILED = [
    ("--topology v9:4x2", "has no topology 'v9:4x2' "),
    ("--mesh x=4,y=3", "axes {{'x': 4, 'y': 3}}, but v5e:4x2 has 8 devices; let"),
    ("--options xla_foo=bar", "xla_foo=bar is refused by {versions}: INVALID_ARGUMENT: No such"),
    (f"{VMEM}=65536 {VMEM}i=1", "did you mean 'xla_tpu_scoped_vmem_limit_kib'? leave it out"),
    (
        "--topology v6e:4x2 --options 'continuation fusion'",
        "n=true of 'continuation fusion' (for v5e) is refused by {versions}: FAILED_PRECON",
    ),
    ("--function own:raises", "raises: called with the mesh: KeyError: 8 ({folder}/own.py, line "),
    ("--function own:nothing_compiled", "it returns no array, so nothing is compiled; return"),
    ("--function own:compiled", "return a function and a tuple of its operands"),
    ("--function own:of_no_mesh", "is sharded over a mesh, and no shard_map names one; give jax"),
    ("--function own:too_few", "missing 1 required positional argument: 'y'; let --function"),
    ("--function own:does_not_trace", "cannot compile it: TypeError: dot_general requires"),
    ("--function own:elsewhere", "which is not one of the 8 devices of v5e:4x2"),
    ("--example ring_matmul --shape 7x7x7", "cannot compile it: ValueError: shard_map"),
]
PLAIN = "--function own:plain --json --max-exposed 0.05 --trace trace.json"
PLAIN += " --options 'asynchronous all-to-all' --options xla_enable_async_all_gather=true"
#: A matmul of a shard (27 us) is longer than its hop (24 us).
EXAMPLE = "--example all_gather_matmul --shape 2048x2048x40960"
EXAMPLE += " --draw timeline.svg --text program.txt"
AGAINST = "--function own:plain --against saved.json"
COMPLAINED = [f"{'' if '--e' in one or '--f' in one else AGAINST} {one}" for one, _ in NOT_COMPILED]
UNSHARDED = PLAIN.partition(" --max")[0].replace("plain", "unsharded")
TYPED = [PLAIN, EXAMPLE, AGAINST, UNSHARDED, *COMPLAINED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def typed(folder) -> list:
    """Exit status, output and errors of each command."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install -e '.[tpu]'")
    (folder / "own.py").write_text(USERS_OWN, encoding="utf-8")
    (folder / "saved.json").write_text(
        overlap.report(program(blocking("all-reduce")), chip=CHIP).to_json()
    )
    files = re.compile(r"\w+\.(json|svg|txt)")
    asked = [shlex.split(files.sub(lambda name: str(folder / name[0]), one)) for one in TYPED]
    (folder / "typed.json").write_text(json.dumps(asked))
    done = python("-c", TYPIST, str(folder / "typed.json"), path=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.tpu_aot
def test_a_function_of_the_users_own_is_over_its_budget(typed, folder):
    status, printed, errors = typed[0]
    assert status == 1
    assert "is exposed communication, more than the 5.0%" in errors
    report = json.loads(printed)
    (row,) = report["rows"]
    assert (row["kind"], row["at"]) == ("all-gather", "own.py:12 all_gather")
    named = "asynchronous all-to-all, xla_enable_async_all_gather=True"
    assert report["notes"] == [f"compiled with {named}"]
    assert report["versions"] == {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    (exposed,) = [event for event in events if event.get("cat") == "exposed"]
    assert exposed["dur"] == pytest.approx(report["exposed"] * 1e6)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"compute", *(f"links axis {axis} {way}" for axis in "01" for way in "+-")}


@pytest.mark.tpu_aot
def test_an_example_is_compared_with_its_plain_form(typed, folder):
    status, printed, _ = typed[1]
    *_, last = printed.splitlines()
    assert status == 0
    assert re.fullmatch(r"before: .* \([1-9].*%\); now: .* \(0.*%\), 1.* times as fast", last)
    assert re.search(r"all_gather_matmul, \d+ rounds", printed)
    assert "jit_all_gather_matmul on 8 x v5e" in printed
    assert (folder / "timeline.svg").read_bytes().startswith(b"<svg")
    assert "is_scheduled=true" in (folder / "program.txt").read_text(encoding="utf-8")


@pytest.mark.tpu_aot
def test_a_report_has_lines_a_comparison_and_advice(typed):
    status, printed, _ = typed[2]
    assert status == 0
    assert printed.splitlines()[3].endswith("  1  all-gather  own.py:12 all_gather")
    assert f"libtpu {version('libtpu')}" in printed
    cure = "own.py:12 all_gather; if a matmul takes it: `all_gather_matmul`"
    assert f"\nto change first: {cure}\n" in printed
    assert "before: 750 of 750 us exposed (100.0%); now: " in printed.splitlines()[-1]


@pytest.mark.tpu_aot
def test_a_mesh_that_only_the_shard_map_names_is_enough(typed):
    (_, sharded, _), (status, printed, _) = typed[0], typed[3]
    assert status == 0
    sharded, unsharded = json.loads(sharded), json.loads(printed)
    assert unsharded["rows"] == sharded["rows"]
    assert (unsharded["total"], unsharded["assumptions"]) == (
        sharded["total"],
        sharded["assumptions"],
    )


@pytest.mark.tpu_aot
@pytest.mark.parametrize("n", range(len(NOT_COMPILED)), ids=lambda n: NOT_COMPILED[n][0])
def test_compile_errors_end_with_one_line(typed, folder, n):
    status, out, err = typed[4 + n]
    assert (status, out) == (2, "")
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "libtpu"))
    assert NOT_COMPILED[n][1].format(folder=folder, versions=versions) in err.splitlines()[-1]
