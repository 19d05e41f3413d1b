"""Cores, files, locks, checks of settings, random generators."""
