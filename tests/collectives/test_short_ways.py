"""How many functions of ours a call passes on its way to the first message."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.xla_cpu import loops

PACKAGE = str(Path(ringcoll.__file__).parent)

#: The most functions that a call may pass, and how often it asks `jax.lax` for its collective:
#: once for the type of the result, and once more if the built-in is sent.
WAYS = {
    ("all_gather", "ring"): (38, 1),
    ("all_gather", "auto"): (32, 2),
    ("all_gather", "lax"): (32, 2),
    ("psum", "ring"): (48, 1),
    ("psum", "auto"): (29, 2),
    ("psum", "lax"): (29, 2),
    ("psum_scatter", "ring"): (46, 1),
    ("psum_scatter", "auto"): (29, 2),
    ("psum_scatter", "lax"): (29, 2),
    ("all_to_all", "pairwise"): (42, 1),
    ("all_to_all", "auto"): (32, 2),
    ("all_to_all", "lax"): (32, 2),
}


def way(name, algorithm):
    """The functions of ours that a call enters, and how often it calls that of `lax`.

    The call is traced and lowered up to the first `ppermute`; by the built-in, until it is lowered.
    What is cached is computed before: schedules and their proofs, plans of rounds, who sends to
    whom, the answers of tables.
    """
    call, built_in = getattr(ringcoll, name), getattr(lax, name).__code__
    dims = (0, 0) if name == "all_to_all" else ()
    passed, asked, sent = set(), 0, False

    def entered(frame, event, arg):
        nonlocal asked, sent
        code = frame.f_code
        if event != "call" or sent:
            return
        # _decided: JAX's event, after the lowering
        sent = code in (lax.ppermute.__code__, loops._decided.__code__)
        if code is built_in:  # of a number it is `axis_size`
            asked += not isinstance(frame.f_locals[code.co_varnames[0]], int)
        elif code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            passed.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    def lowered():
        def program(x):
            return call(x, "x", *dims, algorithm=algorithm)

        mesh = jax.make_mesh((8,), ("x",))
        mapped = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=False)
        jax.jit(mapped).lower(jnp.ones((8, 16)))

    lowered()
    jax.clear_caches()  # it would not ask again for the type of a call that other tests made too
    sys.setprofile(entered)
    try:
        lowered()
    finally:
        sys.setprofile(None)
    return passed, asked


@pytest.mark.parametrize(("name", "algorithm"), WAYS)
def test_a_call_passes_few_functions_before_its_first_message(name, algorithm):
    functions, asked = WAYS[name, algorithm]
    passed, times = way(name, algorithm)
    assert len(passed) <= functions, sorted(passed)
    assert times == asked
