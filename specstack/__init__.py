"""specstack: composable speculative decoding inside the released SGLang server."""

__version__ = "0.1.0"
