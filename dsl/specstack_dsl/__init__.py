"""The pipeline language: text to a frozen, validated Pipeline. No torch, no engine."""
