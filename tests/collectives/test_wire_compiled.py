"""The real compilers of TPUs and GPUs keep a wire narrow: no decoding moves before a message.

Neither a TPU nor a GPU is needed. The programs are compiled in processes of their own: see
`wire_programs`.
"""

import json
from importlib.util import find_spec

import pytest

from ringcoll import Wire, costs


def compiles(topology, mark, package, extra):
    why = f"{package} is not installed: pip install -e '.[{extra}]'"
    is_missing = pytest.mark.skipif(find_spec(package) is None, reason=why)
    return pytest.param(topology, marks=(mark, is_missing))


@pytest.mark.parametrize(
    "topology",
    [
        compiles("v5e:4x2", pytest.mark.tpu_aot, "libtpu", "tpu"),
        compiles("h200:8", pytest.mark.gpu_aot, "jax_cuda13_plugin", "gpu"),
    ],
)
def test_what_travels_is_bytes_as_many_as_priced(topology, printed):
    if topology == "v5e:4x2":  # in the process that has started libtpu for other tests
        found = json.loads(printed("tests/tpu_programs.py"))["wire"]
    else:
        found = json.loads(printed("tests/wire_programs.py", topology))
    assert len(found["dtypes"]) == found["messages"] > 0
    assert {dtype for some in found["dtypes"] for dtype in some} <= {"u8", "s8"}

    n, count = 8, 1024 * 128

    def priced(**options):
        shards = {"psum": count // n, "all_gather": count}
        return sum(costs.wire_bytes(c, "direct", (n,), s, 2, **options) for c, s in shards.items())

    assert found["bytes"] == priced(wire=Wire("int8"))
    assert found["bytes"] <= 0.53 * priced()
