"""Triton twins of `reference`: same names, same signatures, for GPUs."""
