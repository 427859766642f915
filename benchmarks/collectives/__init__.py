"""Benchmarks of the collectives: time and correctness, the table of "auto", a model of scale."""
