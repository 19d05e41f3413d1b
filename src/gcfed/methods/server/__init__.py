"""What the server does with the updates."""
