"""Files that are written whole, JSON that is read strictly, and numbers in words. No JAX."""
