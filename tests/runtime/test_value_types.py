"""A program is the same in every process, whatever the order of its sets."""

from support import python

PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import ringcoll

def gathered_and_summed(x):
    whole = ringcoll.all_gather(x, ("i", "j"), tiled=True, algorithm="ring")
    return ringcoll.psum(whole, ("i", "j"), algorithm="bruck")

mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
f = jax.shard_map(gathered_and_summed, mesh=mesh, in_specs=P(("i", "j")), out_specs=P())
print(*{"i", "j"})
print(jax.jit(f).lower(jnp.ones(16)).as_text())
"""


def test_a_program_over_two_axes_is_lowered_to_one_text(monkeypatch):
    orders, texts = set(), set()
    for seed in "01":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        done = python("-c", PROGRAM)
        assert done.returncode == 0, done.stderr
        order, text = done.stdout.split("\n", 1)
        orders.add(order)
        texts.add(text)
    assert orders == {"i j", "j i"}  # else the test could not fail
    assert len(texts) == 1
