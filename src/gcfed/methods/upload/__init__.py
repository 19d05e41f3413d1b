"""What is sent: fewer bits, bounded norms, noise."""
