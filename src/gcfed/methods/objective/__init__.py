"""Terms of the clients' loss."""
