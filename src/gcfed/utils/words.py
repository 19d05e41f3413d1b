"""Numbers as people say them, and lines for people."""

import sys


def size(count: float) -> str:
    """Bytes with three digits: 3.45 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def say(*lines: str) -> None:
    """To the terminal: a sweep's own words, apart from its jobs' log."""
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()
