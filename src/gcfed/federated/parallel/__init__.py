"""One run on several processes: how they start, share a cohort, and add up."""
