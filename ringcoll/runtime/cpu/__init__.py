"""What controls XLA:CPU's order of loops, messages and work. This folder can be removed.

`loops` makes loops that send wait for other messages, and other messages wait for such loops; the
lowering of a collective registers `loops.keep_apart`. `when_ready` delays messages until the work
that should hide them has started, if the ranks are on several processes; `barriers.order_of_work`
chooses it. Nothing else uses this folder.
"""
