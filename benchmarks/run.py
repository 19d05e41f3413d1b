"""Benchmarks: ``python benchmarks/run.py w1`` prints a table and writes it and all figures to
logs/benchmarks.

Workloads: w1 … w8, digits, vit, gpt (workloads.py). On a CPU each runs in two layouts: one process
with all threads, and one process per core. ``--layout 2x1`` chooses one, processes × threads.
Further words are overrides of the config: ``python benchmarks/run.py w1 precision=bf16-mixed`` or
``python benchmarks/run.py w1 --layout gpu client.stack=5``.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workloads import WORKLOADS, by_phase, on_processors  # noqa: E402
from gcfed.utils.machine import cores  # noqa: E402


def default_layouts() -> list[str]:
    import torch

    if torch.cuda.is_available():
        return ["gpu"]
    return ["1x1"] if cores() == 1 else [f"1x{cores()}", f"{cores()}x1"]


def sit(
    workload: str, layout: str, folder: Path, args: argparse.Namespace, clients: int | None
) -> dict[str, Any]:
    """Runs one sitting in its own process; returns its figures."""
    out = folder / f"{workload}_{layout}{'' if clients is None else f'_{clients}'}.json"
    environment = os.environ | {
        "BENCH_STARTED": str(time.time()),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")])
        ),
        "GOMP_SPINCOUNT": "10000",
    }
    if layout == "gpu":
        trainer = ["trainer=gpu"]
    else:
        processes, threads = map(int, layout.split("x"))
        environment["OMP_NUM_THREADS"] = str(processes * threads)
        trainer = on_processors(processes)
    command = [
        sys.executable,
        "-m",
        "benchmarks.sitting",
        workload,
        "--out",
        str(out),
        *trainer,
        *args.overrides,
    ]
    command += ["--pairs", str(args.pairs)] if args.pairs else []
    command += ["--clients", str(clients)] if clients is not None else []
    with out.with_suffix(".log").open("w") as log:
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        ).returncode
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {code}; see {out.with_suffix('.log')}")
    return json.loads(out.read_text()) | {"layout": layout}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown with a line per layout and method; ratios are to the plain loop of
    the same sitting.
    """
    lines = [
        (
            "| clients | processes × threads | | samples/s | of the plain loop | of GEMM |"
            " training, s | round, s | GB |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        where = r["layout"] if r["device"] != "cpu" else f"{r['processes']} × {r['threads']}"
        rate, flops = r["plain_samples_per_s"], r["mflop_per_sample"] * 1e6
        head = f"| {r['clients']:,} | {where} "
        share = rate * flops / (r["gemm_gflops"] * 1e9)
        lines.append(
            f"{head}| plain loop | {rate:,.0f} | 1 | {share:.0%} | {r['samples'] / rate:.2f} | | |"
        )
        for method, name in (("fedavg", "FedAvg"), ("gcfed", "GC-Fed")):
            m = r[method]
            lines.append(
                f"{head}| {name} | {m['samples_per_s']:,.0f} | {m['of_plain']:.3f} |"
                f" {m['of_gemm']:.0%} | {m['train_s']:.3f} | {m['round_s']:.3f} |"
                f" {r['peak_gb']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument(
        "--layout",
        action="append",
        help="processes × threads, such as 2x1, or gpu; may be repeated",
    )
    parser.add_argument("--pairs", type=int, help="measured pairs of rounds")
    parser.add_argument("--out", type=Path, help="folder for the figures")
    args, args.overrides = parser.parse_known_args()
    if unknown := [word for word in args.overrides if "=" not in word]:
        parser.error(f"{' '.join(unknown)}: not an option, and not an override, which is key=value")
    folder = (
        args.out
        or ROOT / "logs" / "benchmarks" / f"{args.workload}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    workload = WORKLOADS[args.workload]
    layouts = args.layout or (default_layouts()[-1:] if workload.populations else default_layouts())
    results = []
    for layout in layouts:
        for clients in workload.populations or (None,):
            results.append(sit(args.workload, layout, folder, args, clients))
    import torch

    machine = (
        f"{platform.processor() or platform.machine()}, {cores()} cores, torch {torch.__version__}"
    )
    text = (
        f"## {args.workload}: {workload.title}\n\n{machine};"
        f" {' '.join(args.overrides) or 'float32'}; medians of "
    )
    text += (
        f"{len(results[0]['rounds']) // 2} pairs of rounds of {results[0]['samples']:,.0f}"
        " samples.\n\n"
    )
    text += table(results) + "\n\n"
    for r in results:
        text += f"{r['layout']}, {r['clients']:,} clients: GC-Fed takes "
        text += f"{r['gc_over_fedavg'] - 1:+.1%} of FedAvg's time; first round begins after "
        text += (
            f"{r['before_first_round_s']:.1f} s and is over after {r['first_round_done_s']:.1f} s\n"
        )
    if not workload.populations:
        parts = {r["layout"]: r["gcfed"]["parts_s"] for r in results}
        text += "\n" + by_phase("a round of GC-Fed in rank 0, ms", 1e3, 1, parts) + "\n"
    (folder / "table.md").write_text(text)
    (folder / "figures.json").write_text(json.dumps(results, indent=1))
    print(text + f"\n{folder}")


if __name__ == "__main__":
    main()
