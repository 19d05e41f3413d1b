"""Times a report of 1,000 runs of 800 rounds: ``OMP_NUM_THREADS=1 python benchmarks/report.py [runs
[rounds]]``.
"""

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from omegaconf import OmegaConf

from gcfed.folders.folder import find_runs
from gcfed.reporting import write_report
from gcfed.utils.compose import composed

METHODS = (
    "fedavg none",
    "fedprox none",
    "fedlc none",
    "fedvarp none",
    "fedavg local",
    "fedavg global",
    "fedavg gcfed",
)
COLUMNS = (
    "round,train/loss,train/clients,train/nonfinite_clients,comm/down_bytes,comm/up_bytes,time/train_s,"
    "time/round_s,test/acc,test/loss,test/acc_smooth10,test/acc_ema"
)


def write_runs(folder: Path, runs: int, rounds: int) -> None:
    """Seven methods, three seeds, and as many values of α as needed; some runs are unfinished."""
    configs = []
    for method in METHODS:
        algorithm, gc = method.split()
        overrides = [f"algorithm={algorithm}", f"gc={gc}", f"rounds={rounds}"]
        cfg = composed(["experiment=cifar10_cnn_gcfed", *overrides, "paths.output_dir=x"])
        configs.append(OmegaConf.to_container(cfg, resolve=True))
    rng = np.random.default_rng(0)
    for i in range(runs):
        mine = copy.deepcopy(configs[i % 7])
        mine["seed"] = mine["data"]["seed"] = i // 7 % 3 + 1
        alpha = round(0.05 * (1 + i // 21), 2)
        mine["partition"]["alpha"] = mine["data"]["partitioner"]["alpha"] = alpha
        values = np.sort(rng.random((rounds, 6)), axis=0)
        lines = [
            f"{r},{v[0]},5,0,43129800,43129800,{v[1]},{v[2]},{v[3]},{1 - v[3]},{v[4]},{v[5]}"
            for r, v in enumerate(values, start=1)
        ]
        run = folder / f"{i:04}"
        run.mkdir()
        (run / "config.yaml").write_text(
            yaml.dump(mine, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
        )
        (run / "metrics.csv").write_text("\n".join([COLUMNS, *lines, ""]))
        if i % 50:
            (run / "summary.json").write_text(json.dumps({"rounds": rounds, "time/round_s": 1.0}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=1000)
    parser.add_argument("rounds", type=int, nargs="?", default=800)
    runs, rounds = vars(parser.parse_args()).values()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "logs"
        folder.mkdir()
        write_runs(folder, runs, rounds)
        started = time.perf_counter(), time.process_time()
        find_runs([folder])
        read = time.perf_counter() - started[0], time.process_time() - started[1]
        started = time.perf_counter(), time.process_time()
        write_report(folder, out=f"{name}/out")
        whole = time.perf_counter() - started[0], time.process_time() - started[1]
    print(
        f"{runs} runs of {rounds} rounds: {whole[0]:.1f} s ({whole[1]:.1f} s of a core), reading"
        f" {read[0]:.1f} s ({read[1]:.1f} s)"
    )


if __name__ == "__main__":
    main()
