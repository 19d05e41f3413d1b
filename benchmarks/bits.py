"""Which runs have other bits than before: every algorithm without and with GC, and a few networks.

    python -m benchmarks.bits before.json                 at one commit
    python -m benchmarks.bits after.json before.json      at another one, on the same machine

Another processor or another release of torch may have other bits.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import gcfed

CIFAR = "data=cifar10 model=cnn rounds=2 data.limit_train=2000 data.limit_test=500 partition=iid"
OTHERS = (
    "client.stack=3 rounds=3",
    "algorithm=moon client.stack=3 rounds=3",
    "client=adam rounds=3",
    "precision=bf16-mixed rounds=3",
    "algorithm=scaffold precision=64-true rounds=3",
    CIFAR,
    "data=tiny_shakespeare model=lstm rounds=1 data.limit_test=100",
)


def settings() -> Iterator[str]:
    """The overrides of each run."""
    for path in sorted(Path("configs/algorithm").glob("*.yaml")):
        yield from (f"algorithm={path.stem} gc={gc} rounds=8" for gc in ("none", "gcfed"))
    yield from OTHERS


def digests(overrides: str) -> list[str]:
    """SHA-256 of a run's last weights, and of its rows without times."""
    with tempfile.TemporaryDirectory() as folder:
        result = gcfed.train(
            gcfed.configure(*overrides.split(), "extras.figures=false", folder=f"{folder}/run")
        )
    weights = hashlib.sha256()
    for name, t in sorted(result.model.state_dict().items()):
        weights.update(name.encode() + t.contiguous().numpy().tobytes())
    columns = sorted(name for name in result.frame if not name.startswith("time/"))
    rows = result.frame[columns].to_csv(float_format="%.17g")
    return [weights.hexdigest(), hashlib.sha256(rows.encode()).hexdigest()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(args.before.read_text()) if args.before else {}
    found = {}
    for overrides in settings():
        found[overrides] = digests(overrides)
        pairs = zip(
            ("weights", "rows"),
            found[overrides],
            before.get(overrides, found[overrides]),
            strict=True,
        )
        other = " and ".join(what for what, now, then in pairs if now != then)
        verdict = f"other {other}" if other else "the same" if overrides in before else "noted"
        print(f"{verdict:24}{overrides}", flush=True)
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
