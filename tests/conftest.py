"""Eight virtual CPU devices, and JAX as strict as it can be."""

import fcntl
import gc
import os
import sys
from pathlib import Path

# Tests import tables from folders of other tests, also in processes that they start.
sys.path += sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir())
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        *(path for path in sys.path if path.startswith(str(Path(__file__).parent))),
    ]
)
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Short programs compile faster without LLVM's optimisations, and with all kernels in one module.
# Processes inherit the flags.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)

import jax
import pytest
import support
from browsing import browser as browser
from browsing import visit as visit
from hypothesis import HealthCheck, settings


def pytest_configure() -> None:
    """Start JAX, which reads the flags, then restore them: libtpu does not know all of them."""
    with support.flags_of_cpu():
        jax.devices()


def pytest_collection_finish() -> None:
    """Freeze what is imported: it stays, so the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "ringcoll",
    deadline=None,  # examples compile
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ringcoll")


@pytest.fixture(scope="session")
def printed(tmp_path_factory):
    """Runs a script once for all workers, while the others wait; returns what it prints."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # of all workers

    def run(*arguments: str) -> str:
        file = folder / f"{'-'.join(arguments).replace('/', '-')}.txt"
        with open(f"{file}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                done = support.python(*arguments)
                assert done.returncode == 0, done.stderr[-3000:]
                file.write_text(done.stdout, encoding="utf-8")
        return file.read_text(encoding="utf-8")

    return run


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of at most four positions, so that a shard has several tiles and one is padded."""
    from ringcoll.layers.context_parallel import tiles

    monkeypatch.setattr(tiles, "side", lambda length, heads: min(length, 4))
    monkeypatch.setattr(tiles, "TILE_BYTES", 1)
    tiles.plan.cache_clear()
    yield
    tiles.plan.cache_clear()
