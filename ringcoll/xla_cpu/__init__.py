"""What controls XLA:CPU's order of loops and messages.

`loops` makes loops that send wait for other messages, and other messages wait for such loops. This
folder can be removed, with the line of `ringcoll/__init__.py` that imports it.
"""

from ringcoll.runtime.primitive import on_lowering
from ringcoll.xla_cpu.loops import keep_apart

on_lowering.append(keep_apart)
