"""Shared by all benchmarks: options, data, timing, rows, reports, several processes."""
