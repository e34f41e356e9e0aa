"""Budget policies: how many drafts a round may verify. No torch."""
