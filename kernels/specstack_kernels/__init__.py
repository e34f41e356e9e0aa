"""Tensors in, tensors out: reference implementations and GPU kernels."""
