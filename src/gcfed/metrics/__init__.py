"""Measurements beside accuracy and loss, and what an upload gives away."""
