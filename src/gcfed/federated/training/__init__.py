"""Local training: the batches of K clients, their steps, and the solver."""
