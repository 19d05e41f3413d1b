"""Kills real runs at random moments, resumes them, and compares them with runs that were not
killed.

    python tests/kill.py --times 50 --seed 1

Each sequence runs one algorithm on one or two processes. SIGKILL ends the whole run, or its second
process, up to three times, and ``ckpt_path=last`` continues it. Bit for bit, the global model and
``metrics.csv``, except times, must equal those of a run without kills. ``make test`` does not run
it. Twenty sequences take ten minutes on two cores.
"""

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from harness import ALGORITHMS

from gcfed.utils.resolvers import ROOT

ROUNDS = 16


def start(*words: str) -> subprocess.Popen:
    """Starts ``python src/train.py <words>`` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "src" / "train.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )


def finish(process: subprocess.Popen) -> str:
    """Waits until all processes of a run have ended.

    Returns their output. An error or Ctrl-C here kills them.
    """
    try:
        printed, _ = process.communicate(timeout=600)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    end = time.monotonic() + 30  # a zombie may remain if no process waits for it
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    return printed


def rounds(logs: Path) -> int:
    """Number of rows of the newest ``metrics.csv`` below ``logs``."""
    found = sorted(logs.glob("*/*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    return found[-1].read_text().count("\n") - 1 if found else 0


def kill_after(
    process: subprocess.Popen, logs: Path, row: int, delay: float = 0, *, child: bool = False
) -> None:
    """Kills a run, or its second process, ``delay`` seconds after it has written this row."""
    while process.poll() is None and rounds(logs) < row:
        time.sleep(0.01)
    time.sleep(delay)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if process.poll() is None:
        forked = children.read_text().split() if child else []
        os.kill(int(forked[0]) if forked else process.pid, signal.SIGKILL)


def outcome(logs: Path) -> tuple[bytes, list[dict[str, str]]]:
    """The global model and the rows without times of the finished run below ``logs``."""
    (model,) = logs.glob("*/*/global_model.safetensors")
    with (model.parent / "metrics.csv").open(newline="") as file:
        rows = [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in csv.DictReader(file)
        ]
    return model.read_bytes(), rows


def sequence(words: list[str], logs: Path, rng: random.Random) -> list[int]:
    """Runs to the end with up to three kills.

    Returns the number of finished rounds at each kill.
    """
    kills: list[int] = []
    planned = rng.randint(1, 3)
    while True:
        last = ["ckpt_path=last"] if any(logs.glob("*/*/checkpoints/last.ckpt")) else []
        process = start(*words, f"paths.log_dir={logs}", *last)
        if len(kills) < planned:
            kill_after(
                process,
                logs,
                rng.randint(rounds(logs), ROUNDS),
                rng.random() / 5,
                child=rng.random() < 0.3,
            )
        printed = finish(process)
        if process.returncode == 0:
            return kills
        kills.append(rounds(logs))
        if len(kills) > planned:
            raise SystemExit(f"{' '.join(words)} failed:\n{printed[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20, help="number of sequences")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases and kills")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    equal = 0
    for _ in range(args.times):
        algorithm = rng.choice(ALGORITHMS)
        processes = rng.choice((1, 2))
        words = [
            f"algorithm={algorithm}",
            f"trainer.devices={processes}",
            f"rounds={ROUNDS}",
            "extras.figures=false",
        ]
        with tempfile.TemporaryDirectory(prefix="kill_") as folder:
            straight = Path(folder, "straight")
            killed = Path(folder, "killed")
            finish(start(*words, f"paths.log_dir={straight}"))
            kills = sequence(words, killed, rng)
            same = outcome(killed) == outcome(straight)
        equal += same
        result = "bit-equal" if same else "DIFFERENT"
        print(f"{algorithm} × {processes}, killed after rounds {kills}: {result}", flush=True)
    print(f"{equal} of {args.times} bit-equal")
    raise SystemExit(equal < args.times)


if __name__ == "__main__":
    main()
