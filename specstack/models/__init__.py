"""Models that come from the package index: the catalogue, the cache, the conversion.

`packaged` is what other rooms use; nothing here imports torch.
"""
