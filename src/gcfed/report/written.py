"""Which files a report has written, so that the next one in its folder leaves nothing behind that looks current."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gcfed.utils.files import replacing

MANIFEST = ".written"
_OURS = re.compile(r"(tables|figures)/[^/]+")


def remove_stale(out: Path, written: Iterable[Path]) -> None:
    """Removes what the report before listed and this one, with its files ``written`` below ``out``, has not written."""
    manifest = out / MANIFEST
    now = {path.relative_to(out).as_posix() for path in written}
    before = set(manifest.read_text(encoding="utf-8").splitlines()) if manifest.is_file() else set()
    for name in before - now:
        if _OURS.fullmatch(name) and (out / name).is_file():
            (out / name).unlink()
            with suppress(OSError):  # not empty
                (out / name).parent.rmdir()
    with replacing(manifest) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in sorted(now)), encoding="utf-8")
