"""Hostile clients: what they send."""
