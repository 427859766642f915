"""Ring collectives by hand: thirteen lessons, each with one idea more than the last.

    python -m examples.lessons.01_ring_by_hand

Each is a script, a notebook and a page of the site. They run on any machine in seconds and need
ringcoll alone: eight virtual CPU devices are the ranks. A lesson checks every statement (a line
with a tick), and fails if one is wrong. It ends with two exercises; as a script it runs their
solutions. `docs/learn.md` lists them, each with its idea.
"""
