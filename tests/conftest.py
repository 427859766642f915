"""Eight virtual CPU devices, and JAX as strict as it can be."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "ringcoll",
    deadline=None,  # examples compile
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ringcoll")


@pytest.fixture
def unoptimised(monkeypatch):
    """For processes: what runs for a moment is compiled sooner without LLVM's optimisations."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    monkeypatch.setenv("XLA_FLAGS", flags)
