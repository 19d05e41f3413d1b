"""What follows a round: progress, smoothing, an early end; and the pictures of a run."""
