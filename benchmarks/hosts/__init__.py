"""Benchmarks between hosts made on this machine, and of programs whose processes fail."""
