"""Every public function has an example in its docstring, and it prints what it says.

The examples share what `help(ringcoll)` shows first: imports, a mesh, and `ranks`. Run as a script,
this file runs the examples that compile for TPUs: libtpu is one to a process, and stays.
"""

import doctest
import inspect
import sys
from importlib.util import find_spec

import pytest
from support import python

import ringcoll
from ringcoll import algorithms, costs, debug, draw, formats, layers, learn, overlap, transform
from ringcoll.layers import expert_parallel, fsdp, tensor_parallel
from ringcoll.layers.expert_parallel import auto as expert_auto

LISTS = (
    ringcoll,
    costs,
    layers,
    expert_parallel,
    fsdp,
    tensor_parallel,
    overlap,
    draw,
    formats,
    debug,
    learn,
    transform,
)  # of public names
OWN = (algorithms, expert_auto)  # where what is defined is public
REGISTRY = (algorithms.build, algorithms.in_lax, algorithms.listed_name, algorithms.names)
FOR_TPUS = (
    "ringcoll.placement.meshes",
    "ringcoll.overlap.compilation",
    "ringcoll.transform.trying",
)


def public():
    """Every public function once."""
    listed = [getattr(module, name) for module in LISTS for name in module.__all__]
    own = [
        thing
        for module in OWN
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    every = [*listed, *own, *REGISTRY]
    return {f for f in every if callable(f) and not isinstance(f, type)}


def named(functions):
    return sorted(functions, key=lambda f: f"{f.__module__}.{f.__name__}")


def shared():
    """What the examples share: the lines in the docstring of the package."""
    known = {}
    assert wrong(ringcoll, known) == ""
    return known


def wrong(documented, known):
    """The failures of a docstring's examples. `known` has the names that they use and define."""
    words = inspect.getdoc(documented) or ""
    test = doctest.DocTestParser().get_doctest(words, known, documented.__name__, None, 0)
    if not test.examples:
        return f"{documented.__name__} has no example"
    failures, runner = [], doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=failures.append, clear_globs=False)
    known |= test.globs  # a copy
    return "".join(failures)


@pytest.fixture(scope="module")
def known():
    return shared()


@pytest.mark.parametrize(
    "function",
    named(f for f in public() if f.__module__ not in FOR_TPUS),
    ids=lambda f: f"{f.__module__}.{f.__name__}",
)
def test_an_example_prints_what_it_says(function, known):
    assert wrong(function, dict(known)) == ""


@pytest.mark.exhaustive
@pytest.mark.tpu_aot
@pytest.mark.skipif(find_spec("libtpu") is None, reason="no libtpu: pip install -e '.[tpu]'")
def test_examples_for_tpus_print_what_they_say():
    done = python(__file__)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_public_functions_are_found():
    names = {f.__name__ for f in public()}
    assert {"psum", "ring", "bruck_all_to_all", "seconds", "plan", "deadline", "mesh"} < names
    assert {"attention", "linear", "roundings", "price", "build", "algorithm"} < names


if __name__ == "__main__":
    every = [wrong(f, shared()) for f in named(public()) if f.__module__ in FOR_TPUS]
    sys.stdout.write("".join(every))
