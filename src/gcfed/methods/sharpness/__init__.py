"""Gradients at moved weights."""
