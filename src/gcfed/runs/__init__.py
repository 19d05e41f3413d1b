"""A run on disk: identity, folder, measures, summary."""
