import gcfed  # noqa: F401  (before Lightning, as in the commands)
