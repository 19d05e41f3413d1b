"""A round: the server's and the clients' programs, the transports, and the loop that calls them."""
