"""The raw files of a public set: checked, fetched, and named where something is wrong. Nothing here deletes a file."""

import hashlib
import http.client
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Origin:
    """Where a set comes from, for the errors about it: its name, the folder searched, its official page."""

    name: str
    folder: Path
    page: str

    def advice(self, trouble: str, file: str, download: bool = False) -> str:
        remedy = "" if download else "run with data.dataset.download=true, or "
        return (
            f"data set {self.name}: {trouble} (searched {self.folder.resolve()}). To get it, {remedy}put {file} from "
            f"{self.page} there, or set paths.data_dir (DATA_DIR) to the folder that has it."
        )


def md5sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def obtain(path: Path, md5: str, urls: Sequence[str], origin: Origin, download: bool) -> None:
    """See that ``path`` is there with its checksum, downloading it from the first of ``urls`` that serves it.

    A download becomes visible when it is complete and right, so that neither a kill nor a second process spoils it.

    Raises FileNotFoundError if it is missing and may not, or cannot, be downloaded; ValueError for a wrong checksum.
    """
    if path.exists():
        if (found := md5sum(path)) != md5:
            raise ValueError(
                f"data set {origin.name}: {path} has the wrong checksum (md5 {found} instead of {md5}), perhaps from a "
                "download cut short: move it away, then run with data.dataset.download=true"
            )
        return
    if not download:
        raise FileNotFoundError(origin.advice(f"{path.name} is missing", path.name))

    from torchvision.datasets.utils import download_url  # seconds to import, and most runs read the cache

    path.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    with tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent) as stage:
        for url in urls:
            try:
                download_url(url, stage, path.name, md5)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                failures.append(f"{url}: {error}")
            else:
                (Path(stage) / path.name).replace(path)
                return
    trouble = f"{path.name} could not be downloaded ({'; '.join(failures)})"
    raise FileNotFoundError(origin.advice(trouble, path.name, download=True))
