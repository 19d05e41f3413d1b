"""The data sets: a loader each."""
