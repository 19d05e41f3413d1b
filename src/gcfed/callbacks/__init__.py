"""What follows a round: progress, smoothing, an early end."""
