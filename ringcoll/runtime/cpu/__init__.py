"""What steers XLA:CPU's order of loops, messages and work; the whole room can be taken out.

`loops` makes loops that send, and what sends beside them, wait for each other; the lowering of a
collective registers `loops.keep_apart`. `when_ready` delays messages until the work beside them has
started, if the ranks are on several processes; `barriers.order_of_work` chooses it. Nothing else
knows this room.
"""
