"""Training in a subspace, and adapters."""
