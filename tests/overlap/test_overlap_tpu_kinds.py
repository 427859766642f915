"""The real compiler's texts of other communication: on a tpu7x's sparse cores, and by a kernel."""

import json
from importlib.util import find_spec

import jax
import pytest

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
    ),
]


@pytest.fixture(scope="module")
def found(printed) -> dict:
    """What `tpu_kinds` has compiled."""
    return json.loads(printed("tests/tpu_kinds.py"))


sparse_cores = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="this JAX cannot write a tpu7x's programs as text"
)


@sparse_cores
def test_a_gather_on_sparse_cores_is_exposed(found):
    # Seven shards of 8 MiB over two or three links of 90 GB/s; nothing hides them.
    assert found["gathered"]["kinds"] == ["all-gather"]
    seconds = 7 * 1024 * 4096 * 2 / 90e9
    assert seconds / 3 * 0.999 < found["gathered"]["exposed"] < seconds / 2 * 1.001
    assert found["gathered"]["unread"] == []


@sparse_cores
def test_sums_on_sparse_cores_are_read(found):
    assert found["summed"]["kinds"] == ["all-reduce", "reduce-scatter"]
    assert found["summed"]["exposed"] > 0
    assert found["summed"]["unread"] == []


def test_a_kernel_with_remote_copies_is_unread_by_name(found):
    (name,) = found["kernel"]["unread"]
    assert found["kernel"]["kinds"] == []
    assert any(name in note and "remote copies" in note for note in found["kernel"]["notes"])
