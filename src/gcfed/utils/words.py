"""Numbers as people say them."""


def size(count: float) -> str:
    """Bytes with three digits: 3.45 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
