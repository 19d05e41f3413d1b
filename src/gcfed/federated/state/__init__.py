"""What clients keep from one round to the next."""
