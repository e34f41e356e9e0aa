"""The definitions: loops that are obviously right. Every faster version is tested against them."""
