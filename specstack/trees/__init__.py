"""Tree builders: which candidates of a round the target verifies."""
