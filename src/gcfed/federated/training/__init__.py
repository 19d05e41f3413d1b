"""Local training: batches, K clients in a stack, the solver, and the probe of a user's network."""
