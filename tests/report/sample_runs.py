"""Run folders as runs leave them, without a run: the composed config, rows made by a formula, and how the run ended."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from gcfed.runs.metrics_csv import read_metrics
from gcfed.runs.summary import summary_of
from gcfed.utils.compose import train_composer

COMPOSER = train_composer()


@cache
def composed(overrides: tuple[str, ...]) -> str:
    return json.dumps(OmegaConf.to_container(COMPOSER([*overrides, "paths.output_dir=run"]), resolve=True))


def add_run(
    folder: Path, overrides: str, rows: list[dict[str, float]], *, seed=1, ended=True, failure="", **config: Any
) -> None:
    """Writes the folder of a run with these overrides (separated by blanks) and rows of ``metrics.csv``.

    ``ended``: whether it wrote its summary; ``failure``: the text of its ``failure.txt``; ``config``: further keys.
    """
    folder.mkdir(parents=True)
    cfg = json.loads(composed(tuple(overrides.split()))) | config | {"seed": seed}
    cfg["data"]["seed"] = seed
    (folder / "config.yaml").write_text(yaml.dump(cfg, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(repr(row[n]) if n in row else "" for n in names) for row in rows]
    (folder / "metrics.csv").write_text("\n".join([",".join(names), *lines, ""]))
    if failure:
        (folder / "failure.txt").write_text(failure)
    elif ended:
        summary = summary_of(read_metrics(folder / "metrics.csv"), cfg["targets"], 1)
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
        (folder / "summary.json").write_text(json.dumps(finite))


def curve(level: float, rounds: int, seed: int = 1, every: int = 1, **columns: float) -> list[dict[str, float]]:
    """A run that climbs to ``level``, with waves of its own for each seed; further columns scale with the accuracy."""
    rows, average = [], math.nan
    for t in range(1, rounds + 1):
        row = {"round": t, "train/loss": 2.3 / (1 + 0.1 * t), "train/clients": 5, "train/nonfinite_clients": 0,
               "comm/down_bytes": 500_000, "comm/up_bytes": 400_000 + 1000 * seed,
               "time/train_s": 0.5 + 0.001 * (t % 7), "time/round_s": 0.75 + 0.002 * (t % 5)}  # fmt: skip
        wave = 0.02 * math.sin(t * (0.7 + 0.1 * seed)) * math.exp(-t / rounds)
        acc = level * (1 - math.exp(-t / (0.15 * rounds))) + wave
        average = acc if average != average else 0.9 * average + 0.1 * acc
        if t % every == 0 or t == rounds:
            row |= {"test/acc": acc, "test/loss": 2.3 * (1 - 0.9 * acc), "test/acc_ema": average}
            row |= {name: scale * (1 + acc) for name, scale in columns.items()}
        rows.append(row)
    return rows


def regression(level: float, rounds: int, every: int) -> list[dict[str, float]]:
    """A run of the matrix regression: no accuracies, a relative error that falls to ``level``."""
    rows = [{k: v for k, v in row.items() if not k.startswith("test/")} for row in curve(0.5, rounds)]
    for row in rows[every - 1 :: every]:
        row["test/relative_error"] = level + math.exp(-10 * row["round"] / rounds)
        row["test/loss"] = row["test/relative_error"] ** 2
    return rows


def sample(root: Path) -> Path:
    """What the golden tables in ``golden/`` are of: repetitions, two federations and more, a λ sweep, all endings."""
    table5 = "experiment=cifar10_cnn_gcfed partition.alpha=0.05"
    for seed in (1, 2, 3):
        add_run(root / f"t5_fedavg_s{seed}", f"{table5} gc=none", curve(0.53 + 0.02 * seed, 800, seed), seed=seed)
        add_run(root / f"t5_gcfed_s{seed}", table5, curve(0.66 + 0.01 * seed, 800, seed), seed=seed)
    for seed in (1, 2):
        rows = curve(0.55 - 0.015 * seed, 800, seed)
        add_run(root / f"t5_fedprox_s{seed}", f"{table5} algorithm=fedprox gc=none", rows, seed=seed)
    scaffold = f"{table5} algorithm=scaffold gc=none"
    rows = [row | {"test/acc": 0.1, "test/loss": math.nan} if row["round"] > 60 else row for row in curve(0.4, 800)]
    add_run(root / "t5_scaffold_s1", scaffold, rows)
    add_run(root / "t5_scaffold_s2", scaffold, curve(0.4, 100), seed=2, failure="ValueError: no memory\nTraceback")
    add_run(root / "t5_scaffold_s3", scaffold, curve(0.4, 50), seed=3, ended=False)
    add_run(root / "t5_global_s1", f"{table5} gc=global rounds=20", curve(0.3, 20))

    table2 = "experiment=cifar10_cnn_gcfed participation.num_clients=200 partition.alpha=0.05"
    add_run(root / "t2_fedavg_s1", f"{table2} gc=none", curve(0.45, 800, 4))
    add_run(root / "t2_gcfed_s1", table2, curve(0.64, 800, 5))

    acg = "experiment=cifar10_resnet18_fedacg participation.per_round=2"
    add_run(root / "acg_fedavg_s1", f"{acg} algorithm=fedavg", curve(0.7, 1000))
    add_run(root / "acg_fedacg_s1", acg, curve(0.85, 1000))

    ssf = "experiment=matrix_regression_ssf heterogeneity=low"
    for name, algorithm, level in (("fedavg", "fedavg", 0.009), ("scaffold", "scaffold", 0.0071),
                                   ("ssf", "ssf methods.ssf.ratio=0.2", 0.0076)):  # fmt: skip
        add_run(root / f"ssf_{name}_s1", f"{ssf} algorithm={algorithm}", regression(level, 400, 20))

    digits = "data=digits model=mlp model.hidden=[64,64] rounds=30 metrics=drift"
    drift = {"drift/client_norm": 0.8, "drift/update_norm": 0.3}
    for seed in (1, 2):
        for lam in (0.0, 0.5, 1.0):
            rows = curve(0.8 + 0.1 * lam - 0.01 * seed, 30, seed, **drift)
            add_run(root / f"digits_lam{lam}_s{seed}", f"{digits} gc.lam={lam}", rows, seed=seed)
        add_run(root / f"digits_fedavg_s{seed}", f"{digits} gc=none", curve(0.75, 30, seed, **drift), seed=seed)
    add_run(root / "digits2_fedavg_s1", f"{digits} partition.alpha=1 gc=none", curve(0.85, 30, 3, every=5))
    add_run(root / "digits2_gcfed_s1", f"{digits} partition.alpha=1", curve(0.93, 30, 6, every=5))
    return root
