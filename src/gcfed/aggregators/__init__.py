"""Rules in place of the mean."""
