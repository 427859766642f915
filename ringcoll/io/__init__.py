"""Write files whole, read JSON strictly, write numbers in words. Nothing here imports JAX."""
