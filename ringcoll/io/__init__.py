"""Files and text: written whole, read strictly, and numbers in words. No JAX, no collective."""
