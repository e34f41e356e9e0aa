"""Training draft heads: from prompts to the target's own answers, from answers to a head."""
