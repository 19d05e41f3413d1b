"""What lies in the folders of runs and searches, read against bounds and types: it may be damaged, or made to harm.

Every function here raises ValueError of what it does not take; those that read a file name it, checks name the key.
``metrics.csv``, a row a round, is read here alone; ``gcfed.loggers.folder`` writes it.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import Field

from gcfed.utils.checked import Count, Number, SettingError, Whole, fits
from gcfed.utils.files import replacing
from gcfed.utils.resolvers import CONFIGS
from gcfed.utils.words import size

if TYPE_CHECKING:
    import numpy as np  # nothing heavy is imported before Hydra has asked for the folder of a run
    import pandas as pd
    from numpy.typing import NDArray

    from gcfed.data.datamodule import FederatedDataModule

LABEL_COUNTS = "label_counts.npz"
LARGEST, DEPTH, NODES, LABEL = 2**20, 24, 20_000, 100  # letters of a file, levels, settings, letters of a name
SIZE, COLUMNS = 2**28, 10_000  # of a table
FINITE = 1e200  # of numbers beyond, no mean or deviation is one
ROUNDS = 10_000_000
Rounds = Annotated[int, Field(ge=0, le=ROUNDS)]
Figure = Annotated[float, Field(ge=-FINITE, le=FINITE)] | None
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML was built with it


@cache
def shipped(name: str) -> dict[str, Any]:
    """What a file of our ``configs`` sets, ``attack/sign_flip``; {} where there is none."""
    path = CONFIGS / f"{name}.yaml"
    return yaml.load(path.read_text(encoding="utf-8"), Loader) if path.is_file() else {}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What is wrong with a file, in one line with its name, in place of whatever the system or a parser raises."""
    try:
        yield
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        kind = "" if type(error) in (ValueError, SettingError) else f"{type(error).__name__}: "
        raise ValueError(f"{path.name}: {kind}{' '.join(said.split())[:300]}") from None


def read_text(path: Path, most: int = LARGEST, errors: str = "strict") -> str:
    """The text of a regular file in UTF-8, of so many letters at most."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes to would wait for ever
    with os.fdopen(descriptor, encoding="utf-8", errors=errors) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it is larger than {size(most)}")
    return text


@lru_cache(maxsize=4096)
def parse_yaml(text: str) -> Any:
    """Plain values. Aliases are refused, of which few make many; no run writes any."""
    depth = 0
    for event in yaml.parse(text, Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias" if depth <= DEPTH else f"it is more than {DEPTH} levels deep")
    return plain(yaml.load(text, Loader))


def plain(node: Any) -> Any:
    """The tree, if its whole numbers have at most 64 bits and each mapping has one kind of keys."""
    if isinstance(node, dict) and len({*map(type, node)}) > 1:
        raise ValueError(f"its keys are of several kinds: {', '.join(map(repr, [*node][:5]))}")
    if isinstance(node, int) and abs(node) >= 2**63:
        raise ValueError("it has a whole number of more than 64 bits")
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        plain(item)
    return node


def mapping(key: str, value: Any) -> dict[Any, Any]:
    """``value``, if it is a mapping; {} for None."""
    return fits(key, value, dict | None) or {}


def short(key: str, value: Any) -> None:
    """Refuses what cannot stand in a table's line or on a figure."""
    if len(fits(key, value, str | None) or "") > LABEL or not (value or "").isprintable():
        raise ValueError(f"{key} must be a line of at most {LABEL} letters")


def read_yaml(path: Path, check: Callable[[dict[Any, Any]], object] = bool) -> dict[Any, Any]:
    """A mapping from a file, {} from an empty one; ``check`` raises if it is not as it must be.

    Each block of the top level is read once: most are alike in all runs of a sweep.
    """
    with naming(path):
        if (text := read_text(path)).count(":") > NODES:
            raise ValueError(f"it has more than {NODES:,} settings")
        try:
            blocks = re.split(r"\n(?=[^\s#-])", text)
            found = {key: value for block in blocks for key, value in parse_yaml(block).items()}
        except (yaml.YAMLError, AttributeError):  # not as a run writes it
            found = mapping("it", parse_yaml(text))
        check(found)
        return found


def check_config(config: Mapping[str, Any]) -> None:
    """Refuses a run's ``config.yaml`` that a report cannot compute with; other keys may have any value."""
    fits("seed", config.get("seed"), Whole)
    fits("rounds", config.get("rounds"), Rounds)
    fits("eval_every", config.get("eval_every"), Count | None)
    if len(fits("targets", config.get("targets", []), Sequence[Number])) > LABEL:
        raise ValueError(f"targets has more than {LABEL} numbers")
    short("precision", config.get("precision"))
    for kind in ("tags", "labels"):
        for key, value in mapping(kind, config.get(kind)).items():
            short(f"{kind}.{key}", value)
    for key, value in mapping("metrics", config.get("metrics")).items():
        mapping(f"metrics.{key}", value)


def read_summary(path: Path) -> dict[str, Any]:
    """A run's ``summary.json``, of figures; {} where there is none, since the run has not come to its end."""
    if not path.exists():
        return {}
    with naming(path):
        found = mapping("it", plain(json.loads(read_text(path))))
        fits("rounds", found.get("rounds", 0), Rounds)
        for key, value in found.items():  # figures, and texts that say what the run is
            if "_to_target" in key:
                fits(key, [*mapping(key, value).values()], Sequence[Figure])
            elif key in ("classes", "ended") or (isinstance(value, str) and "/" not in key):
                short(key, value)
            else:
                fits(key, value, Figure)
        if (ended := found.get("ended")) is not None:
            datetime.fromisoformat(ended).timestamp()
    return found


def read_metrics(path: Path | None, *, text: bool = False) -> pd.DataFrame:
    """The rows by round; none where there is no file, or None for one. A last line that a kill cut short is left out.

    An empty cell, where nothing was measured, is NaN; one that says ``nan`` was measured, and is infinite like others
    that are not finite, so that the last number of a run that diverged is not one from before.

    Args:
        text: cells as they stand in the file instead of numbers, to be written again as they were.
    """
    import pandas as pd

    with naming(path or Path()):
        whole = read_text(path, SIZE) if path is not None and path.exists() else ""
        whole = whole[: whole.rfind("\n") + 1]
        if whole.count("\n") < 2:
            return pd.DataFrame(index=pd.Index([], name="round", dtype="int64"))
        header, body = whole.split("\n", 1)
        try:
            if header.count(",") > COLUMNS:
                raise ValueError(f"it has more than {COLUMNS:,} columns")
            if text:
                return pd.read_csv(io.StringIO(whole), dtype=str, keep_default_na=False).set_index("round", drop=False)
            table = pd.read_csv(io.StringIO(f"{header}\n{body.replace('nan', 'inf')}"), index_col="round", dtype=float)
            found, table.index = table.index, table.index.astype("int64")
            if not ((table.index == found).all() and table.index.is_monotonic_increasing and table.index.is_unique):
                raise ValueError("its rounds are no whole numbers that increase")
            fits("round", int(found[-1]), Rounds)
        except (ValueError, KeyError) as error:
            raise ValueError(f"it is no table of numbers with a column 'round': {error}") from None
    return table


def column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """A column where it was measured, by round; empty where it never was."""
    return metrics[name].dropna() if name in metrics else metrics.index[:0].to_series().astype(float)


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """How many samples of each class some clients of a run hold: ``label_counts.npz``, small for any federation."""

    clients: NDArray[np.int64]  # ids [S]
    counts: NDArray[np.int64]  # [S, C], samples of class c on client s
    of: int  # clients in all
    names: tuple[str, ...] = ()  # of the classes, [C], where they have any

    def save(self, folder: Path) -> None:
        import numpy as np

        with replacing(folder / LABEL_COUNTS) as temporary, temporary.open("wb") as file:
            np.savez(file, clients=self.clients, counts=self.counts, of=self.of, names=np.array(self.names, str))

    @classmethod
    def load(cls, folder: Path) -> LabelCounts | None:
        """Read it back; None where a run's folder has none, or none that can be read."""
        import numpy as np

        try:
            with np.load(folder / LABEL_COUNTS) as file:
                if sum(part.file_size for part in file.zip.infolist()) > 2**26:
                    return None
                names = tuple(map(str, file["names"])) if "names" in file else ()
                found = cls(file["clients"], file["counts"], int(file["of"]), names)
            rows, classes = found.counts.shape
            is_whole = rows == len(found.clients) and len(names) in (0, classes) and all(map(str.isprintable, names))
            return found if is_whole and found.counts.dtype.kind in "iu" and found.counts.min() >= 0 else None
        except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile):
            return None


def counts_of(data: FederatedDataModule) -> LabelCounts | None:
    """Of up to 50 clients, evenly spaced; None where labels are no classes."""
    if data.labels.dtype.kind != "i":
        return None
    clients = evenly(data.num_clients, 50)
    counts = data.partition.label_counts(data.labels, data.num_classes, clients=clients)
    names = data.dataset.class_names or ()
    return LabelCounts(clients, counts, data.num_clients, names if len(names) == data.num_classes else ())


def evenly(n: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of the ids 0 to n − 1, evenly spaced."""
    import numpy as np

    return np.unique(np.arange(most) * n // most)
