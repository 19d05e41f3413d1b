"""Aggregation rules that replace the mean."""
