"""Hostile clients, and what a curious server could learn from uploads."""
