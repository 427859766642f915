"""Machines: published measurements, the curves fitted to them, and the error of the model."""
