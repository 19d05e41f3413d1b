"""Server optimizers that torch lacks."""
