"""What a curious server could learn from uploads; for measurements of privacy."""
