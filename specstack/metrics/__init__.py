"""What a round reports, and the metric names that it feeds. No torch, no engine."""
