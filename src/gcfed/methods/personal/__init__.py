"""What stays on the client."""
