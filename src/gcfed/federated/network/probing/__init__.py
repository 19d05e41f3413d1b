"""Finds out before the first round how the engine must treat a network."""
