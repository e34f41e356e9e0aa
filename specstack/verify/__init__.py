"""Verification rules: which path of the tree a round accepts."""
