"""Low-rank adapters (LoRA) in any network."""
