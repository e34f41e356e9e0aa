"""How well a drafter drafts: `specstack draft eval`. Torch; no engine and no clock."""
