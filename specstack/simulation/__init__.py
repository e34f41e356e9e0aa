"""A server of rounds without a model: budget policies over arrivals, times and accepted drafts."""
