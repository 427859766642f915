"""The topics of introductions to sharded JAX, with built-in collectives and with ringcoll.

Each is a script, a notebook and a page of the site, on eight virtual CPU devices. It prints its
results. It raises if the two ways differ by more than rounding, or differ at all where nothing is
rounded. It ends with two exercises; as a script it runs their solutions.

    python -m examples.tutorials.arrays         arrays on a mesh: which device holds what
    python -m examples.tutorials.collectives    each collective, and its uses
    python -m examples.tutorials.dense_layer    a layer: automatic, explicit, manual, overlapped
    python -m examples.tutorials.constraints    what the compiler propagates; a constraint
    python -m examples.tutorials.explicit_types shardings as types, their errors, and the cures
    python -m examples.tutorials.layouts        every layout of a matrix on a 2-D mesh, timed
    python -m examples.tutorials.leaving_pmap   one training step by pmap, jit, shard_map
    python -m examples.tutorials.matmuls        the four cases of a product of sharded matrices
    python -m examples.tutorials.resharding     from one layout to another, and the bytes sent
    python -m examples.tutorials.classifier     data-parallel training with a known answer
    python -m examples.tutorials.strategies     data, tensor, 2-D, FSDP: memory and bytes of each
    python -m examples.tutorials.nnx_strategies the same of a transformer in Flax, trained by optax
    python -m examples.tutorials.mesh_chooser   which mesh for a model on N chips, modelled
    python -m examples.tutorials.profiling      a trace of a step, with the rounds named in it
"""
