"""The topics of introductions to sharded JAX, with built-in collectives and with ringcoll.

Each is a script, a notebook and a page of the site, on eight virtual CPU devices. It prints its
results. It raises if the two ways differ by more than rounding, or differ at all where nothing is
rounded. It ends with two exercises; as a script it runs their solutions.

    python -m examples.tutorials.arrays         which device holds what, in four layouts
    python -m examples.tutorials.collectives    the operand and the result on every rank
    python -m examples.tutorials.dense_layer    automatic, explicit, manual, overlapped
    python -m examples.tutorials.constraints    what the compiler propagates; a constraint
    python -m examples.tutorials.explicit_types shardings as types, their errors, and the cures
    python -m examples.tutorials.layouts        a product and a sum in every layout on a 2-D mesh
    python -m examples.tutorials.leaving_pmap   one training step by pmap, jit and shard_map
    python -m examples.tutorials.matmuls        the collective of each case, and our matmul for it
    python -m examples.tutorials.resharding     each change's collective, and the bytes it sends
    python -m examples.tutorials.classifier     gradients summed over ranks; the answer is known
    python -m examples.tutorials.strategies     data, tensor, 2-D, FSDP: memory and bytes of each
    python -m examples.tutorials.nnx_strategies the same for NNX modules, trained by optax
    python -m examples.tutorials.mesh_chooser   modelled: the bytes and the time of each mesh
    python -m examples.tutorials.profiling      the rounds of a collective have names in profiles
"""
