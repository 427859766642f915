"""Benchmarks of collectives: time and correctness, the table of "auto", models of large runs."""
