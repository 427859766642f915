"""The topics of introductions to sharded JAX, with built-in collectives and with ringcoll.

Each is a script, a notebook and a page of the site, on eight virtual CPU devices. It prints its
results. It raises if the two ways differ by more than rounding, or differ at all where nothing is
rounded. It ends with two exercises; as a script it runs their solutions. `docs/learn.md` lists
the tutorials. To run one:

    python -m examples.tutorials.arrays
"""
