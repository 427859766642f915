"""Benchmarks of the collectives: time and correctness, the table of "auto", scale on paper."""
