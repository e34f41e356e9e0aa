"""Pure-torch definitions; also the CPU path."""
