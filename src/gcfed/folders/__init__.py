"""A run on disk: identity, folder, lock, files, measures, summary."""
