"""Machines: what others measured on them, the curves fitted to it, and the error of the model."""
