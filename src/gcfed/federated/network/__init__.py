"""The network: the server's, lent to one client, and side by side for K clients."""
