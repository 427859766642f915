"""Choose how a call runs: plans from measured rows and from prices."""
