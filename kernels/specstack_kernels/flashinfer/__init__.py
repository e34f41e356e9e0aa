"""Thin adapters to FlashInfer's kernels, with `reference`'s conventions."""
