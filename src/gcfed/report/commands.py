"""The commands that make the runs which a paper's table lacks."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from functools import cache

import yaml

from gcfed.report.runs import Loader, Run
from gcfed.utils.resolvers import ROOT, changes_results

COMMAND = "python src/train.py"
_ELSEWHERE = ("seed=", "hydra.", "paths.", "ckpt_path=", "client_store.folder=")  # of one run, or of one machine
# What any row can be given, so that it is as the others of its column.
_SIMPLE = ("rounds=", "precision=", "eval_every=", "client.epochs=", "client.batch_size=", "client.steps=",
           "data.limit_", "trainer.limit_")  # fmt: skip


def command(overrides: Iterable[str], seeds: Sequence[int]) -> str:
    """Trains these seeds."""
    several, seed = " -m" if len(seeds) > 1 else "", ",".join(map(str, seeds))
    return f"{COMMAND}{several} {shlex.join([*overrides, f'seed={seed}'])}"


def own(run: Run) -> tuple[str, ...]:
    """The overrides that made a run, as they make other seeds of it."""
    return tuple(o for o in run.overrides if not o.lstrip("+~").startswith(_ELSEWHERE))


def simple(run: Run, told: Iterable[str]) -> tuple[str, ...]:
    """What another row needs, beside the overrides ``told``, to be as this run: ``rounds=30``."""
    keys = {_key(override) for override in told}
    return tuple(o for o in own(run) if _key(o) not in keys and _is_simple(o))


def beyond(run: Run, told: Iterable[str]) -> frozenset[str]:
    """A run's overrides beside those ``told``, without what changes neither its results nor its length."""
    return frozenset(o for o in own(run) if changes_results(o) or _is_simple(o)) - set(told)


def study(name: str, further: Iterable[frozenset[str]]) -> str:
    """Runs all that a paper's table lacks, as a study; "" where there is none, or it would not fill the cells shown.

    Args:
        further: :func:`beyond` the table's overrides, those of the runs of each cell that has any.
    """
    scales = _scales(name)
    kinds = set(further)
    if scales is None or len(kinds) > 1:
        return ""
    shared = kinds.pop() if kinds else frozenset()
    scale = next((label for label, overrides in scales.items() if shared and overrides == shared), None)
    if scale is None and not all(map(_is_simple, shared)):
        return ""
    return f"{COMMAND} -m {shlex.join([f'study={name}', *([f'scale={scale}'] if scale else sorted(shared))])}"


@cache
def _scales(name: str) -> dict[str, frozenset[str]] | None:
    """What each scale of a study overrides; None where there is no such study."""
    path = ROOT / "configs" / "study" / f"{name}.yaml"
    if not path.is_file():
        return None
    scales = yaml.load(path.read_text(encoding="utf-8"), Loader)["study"].get("scales") or {}
    return {label: frozenset(map(str, scale.get("overrides") or ())) for label, scale in scales.items()}


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _is_simple(override: str) -> bool:
    return override.lstrip("+").startswith(_SIMPLE)
