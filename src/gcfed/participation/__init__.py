"""Who takes part in a round, when, and how long it takes. Nothing here reads a sample."""
