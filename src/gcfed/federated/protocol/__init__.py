"""What passes between the server and its clients, and what the server knows of a round."""
