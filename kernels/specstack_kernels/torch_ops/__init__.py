"""Vectorised twins of `reference`: same signatures, any device, no host sync."""
