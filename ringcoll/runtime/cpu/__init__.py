"""What controls XLA:CPU's order of loops and messages. This folder can be removed.

`loops` makes loops that send wait for other messages, and other messages wait for such loops. The
lowering of a collective (`runtime/primitive.py`) registers `loops.keep_apart`; nothing else uses
this folder.
"""
