"""Is nothing lost? Kills real runs at random moments, resumes them, and compares them with runs that nobody disturbed.

    python tests/kill.py --times 50 --seed 1

Each sequence is one run of an algorithm, on one process or two: started by ``python src/train.py``,
killed by SIGKILL (the whole run, or its second process) up to three times, resumed by ``ckpt_path=last`` to its end.
Global model and ``metrics.csv``, but for its times, must be those of the undisturbed run bit for bit. Not a part of
``make test``; twenty sequences take about ten minutes on two cores.
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
from itertools import product
from pathlib import Path
from statistics import median

from harness import ALGORITHMS

from gcfed.utils.resolvers import ROOT

ROUNDS, STARTUP = 16, 8  # seconds within which a run has begun


def start(*words: str) -> subprocess.Popen:
    """``python src/train.py <words>`` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "src" / "train.py"), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
    """Waits until all of its processes are gone; what they printed. They do not outlive an error or Ctrl-C here."""
    try:
        printed, _ = process.communicate(timeout=600)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    end = time.monotonic() + 30  # a zombie whose parent does not ask for it is there for ever
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    return printed


def rounds(logs: Path) -> int:
    """Rows of the ``metrics.csv`` that was written last below ``logs``."""
    found = sorted(logs.glob("*/*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    return found[-1].read_text().count("\n") - 1 if found else 0


def kill_after(process: subprocess.Popen, logs: Path, row: int, delay: float = 0, *, child: bool = False) -> None:
    """Kills a run, or its second process, so many seconds after it has written this row; 0: after it was started."""
    while process.poll() is None and rounds(logs) < row:
        time.sleep(0.01)
    time.sleep(delay)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if process.poll() is None:
        forked = children.read_text().split() if child else []
        os.kill(int(forked[0]) if forked else process.pid, signal.SIGKILL)


def outcome(logs: Path) -> tuple[bytes, list[dict[str, str]], float]:
    """Of the one run below ``logs`` that has ended: its global model, its rows without times, seconds a round."""
    (model,) = logs.glob("*/*/global_model.safetensors")
    with (model.parent / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seconds = median(float(row["time/round_s"]) for row in rows)
    return model.read_bytes(), [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows], seconds


def sequence(words: list[str], logs: Path, rng: random.Random, seconds: float) -> list[int]:
    """Runs to the end through up to three kills, one in ten before the first round; the rounds finished at each.

    A round takes so many ``seconds``.
    """
    kills: list[int] = []
    planned = rng.randint(1, 3)
    while True:
        last = ["ckpt_path=last"] if any(logs.glob("*/*/checkpoints/last.ckpt")) else []
        process = start(*words, f"paths.log_dir={logs}", *last)
        if len(kills) < planned:
            row = 0 if rng.random() < 0.1 else rng.randint(min(rounds(logs), ROUNDS - 1), ROUNDS - 1) + 1
            delay = rng.random() * (1.5 * seconds if row else STARTUP)
            kill_after(process, logs, row, delay, child=rng.random() < 0.3)
        printed = finish(process)
        if process.returncode == 0:
            return kills
        kills.append(rounds(logs))
        if len(kills) > planned:
            raise SystemExit(f"{' '.join(words)} does not come to its end:\n{printed[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="sequences")
    parser.add_argument("--seed", type=int, default=0, help="of cases and kills")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    cases = list(product(ALGORITHMS, (1, 2)))
    rng.shuffle(cases)
    straight: dict[tuple[str, int], tuple] = {}
    equal = killed = 0
    for algorithm, processes in (cases[i % len(cases)] for i in range(args.times)):
        words = [f"algorithm={algorithm}", f"trainer.devices={processes}", f"rounds={ROUNDS}", "extras.figures=false"]
        with tempfile.TemporaryDirectory(prefix="kill_") as folder:
            if (algorithm, processes) not in straight:
                finish(start(*words, f"paths.log_dir={folder}/straight"))
                straight[algorithm, processes] = outcome(Path(folder) / "straight")
            *expected, seconds = straight[algorithm, processes]
            kills = sequence(words, Path(folder) / "killed", rng, seconds)
            same = list(outcome(Path(folder) / "killed")[:2]) == expected
        equal, killed = equal + same, killed + len(kills)
        where = f"killed after round {', '.join(map(str, kills))}" if kills else "never killed"
        print(f"{algorithm} × {processes}, {where}: {'bit-equal' if same else 'DIFFERENT'}", flush=True)
    print(f"{equal} of {args.times} bit-equal ({killed} kills)")
    raise SystemExit(equal < args.times)


if __name__ == "__main__":
    main()
