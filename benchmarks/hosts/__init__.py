"""Benchmarks between hosts that are made on this machine, and of programs that fail."""
