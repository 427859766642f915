"""What pictures and pages are made of: SVG, and HTML with its style."""
