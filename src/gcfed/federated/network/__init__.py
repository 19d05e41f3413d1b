"""The network: the server's, lent to one client, and side by side for K clients.

``probing`` finds out before the first round what is special about it.
"""
