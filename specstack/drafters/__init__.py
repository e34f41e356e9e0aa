"""Drafters: who proposes the continuations of a round."""
