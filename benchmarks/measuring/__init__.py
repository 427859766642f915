"""What every benchmark shares: options, data, timing, rows, reports, several processes."""
