"""Benchmarks between hosts that are made on this machine, and what happens when one fails."""
