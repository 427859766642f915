"""What introductions to sharded JAX teach, the built-in way and by ringcoll, side by side.

Run each by its name, on eight virtual CPU devices. It prints its results. It raises if the two
ways differ by more than rounding, or at all where nothing is rounded. The extra `bench` has what
they need besides JAX.

    python -m examples.tutorials.arrays         arrays on a mesh: what is on which device
    python -m examples.tutorials.collectives    each collective, and what is made of it
    python -m examples.tutorials.dense_layer    a layer: automatic, explicit, manual, overlapped
    python -m examples.tutorials.matmuls        the four cases of a product of sharded matrices
    python -m examples.tutorials.resharding     from one layout to another, and what it sends
    python -m examples.tutorials.classifier     data-parallel training, its answer known
    python -m examples.tutorials.strategies     data, tensor, 2-D, FSDP: memory and bytes of each
    python -m examples.tutorials.mesh_chooser   which mesh for a model on N chips, modelled
    python -m examples.tutorials.profiling      a trace of a step, with the rounds named in it
"""
