"""What all benchmarks share: options, data, timing, rows, reports, several processes."""
