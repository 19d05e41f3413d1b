"""Measurements in addition to accuracy and loss, and what an upload reveals."""
