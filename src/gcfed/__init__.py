"""Federated learning on heterogeneous data."""

__version__ = "0.1.0"
