"""Write files whole, read JSON strictly, write numbers in words, draw SVG. No file imports JAX."""
