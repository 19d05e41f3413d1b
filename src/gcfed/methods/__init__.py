"""Federated methods, one small file each: a client part, a server part, or both."""
