#!/usr/bin/env bash
# A stranger's first day, for real: clone, demo, own images and table, torchvision's network, own network and method, typing errors,
# sweep, the same from Python, report;
# no file of the clone is edited. Uses the environment of this checkout where there is one; two minutes on two cores without its set-up.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
day=$(mktemp -d)
trap 'rm -rf "$day"' EXIT
step() {
    local name=$1 from=$SECONDS
    shift
    "$@" >"$day/said.txt" 2>&1 || { tail -n 40 "$day/said.txt"; echo "first day: $name failed"; exit 1; }
    echo "first day: $name, $((SECONDS - from)) s"
}

step "clone" git clone --quiet "$here" "$day/gcfed"
cd "$day/gcfed"
make="make"
if [ -f "$here/.venv/.installed" ]; then
    ln -s "$here/.venv" .venv
    export PYTHONPATH=$PWD/src  # the clone's own code
    make="make --assume-old=requirements.lock --assume-old=pyproject.toml"
fi
step "make demo" $make demo

mkdir -p "$day/mine/conf/algorithm"
cd "$day/mine"
cat >paint.py <<'END'
from pathlib import Path

import numpy as np
from PIL import Image

rng = np.random.default_rng(0)
for label, colour in (("apple", (200, 40, 40)), ("lime", (90, 200, 60)), ("plum", (110, 50, 160))):
    for split, images in (("train", 20), ("test", 8)):
        folder = Path("fruit", split, label)
        folder.mkdir(parents=True)
        for i in range(images):
            pixels = rng.normal(colour, 60, (32, 32, 3)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
END
cat >table.py <<'END'
import numpy as np
import pandas as pd

rng = np.random.default_rng(0)
for clinic in ("north", "south", "east"):
    pressure, age = rng.normal(120, 15, 60), rng.integers(20, 90, 60)
    outcome = np.where(pressure + age / 3 + rng.normal(0, 5, 60) > 138, "ill", "well")
    sex = rng.choice(["f", "m"], 60)
    pd.DataFrame({"pressure": pressure, "age": age, "sex": sex, "outcome": outcome}).to_csv(f"clinics/{clinic}.csv", index=False)
END
cat >compare.py <<'END'
import gcfed

common = ["rounds=2", "client.epochs=1", "extras.figures=false"]
methods = {"GC-Fed": gcfed.configure(common), "FedAvg": gcfed.configure(common, "gc=none")}
comparison = gcfed.compare(methods, seeds=(1, 2), folder="compared", quiet=True)
comparison.figure().savefig("compared.png")
print(comparison.table())
END
misspelt() {
    local said words answer
    while IFS="|" read -r words answer; do  # $words is split, as a shell does
        ! said=$("$python" "$day/gcfed/src/train.py" $words 2>&1 </dev/null) && grep -F "$answer" <<<"$said" || return 1
    done <<'END'
algoritm=fedprox|did you mean algorithm=fedprox?
--epochs 3|did you mean client.epochs=3?
gc=none gc.lam=0.5|without gc=gcfed
END
}
cat >halved.py <<'END'
import torch

from gcfed.federated.parts import ServerPart


class Halved(ServerPart):
    """The server goes half of the way."""

    def on_aggregate_end(self, update, round):
        torch._foreach_mul_(list(update.values()), 0.5)
END
cat >mynet.py <<'END'
from torch import nn


def small(num_classes):
    return nn.Sequential(nn.Conv2d(3, 8, 5, stride=3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))
END
cat >conf/algorithm/halved.yaml <<'END'
# @package _global_
defaults: [fedavg, _self_]
tags:
  algorithm: halved
labels:
  algorithm: Halved
methods:
  halved:
    _target_: halved.Halved
END
python=$day/gcfed/.venv/bin/python
federation="data=image_folder data.root=fruit participation.num_clients=5 participation.per_round=3 rounds=3 client.epochs=1"
network="model=torchvision model.name=mobilenet_v3_small model.norm_policy=group"
method="algorithm=halved"
step "own images" "$python" paint.py
mv fruit "fruit (1), a=b"
step "own images, in a folder with Hydra's signs" "$python" "$day/gcfed/src/train.py" $federation "data.root=fruit (1), a=b" debug=fast
mv "fruit (1), a=b" fruit
step "own images, torchvision's network" "$python" "$day/gcfed/src/train.py" $federation $network
mkdir clinics
step "a table" "$python" table.py
step "own table, a file a client" "$python" "$day/gcfed/src/train.py" data=csv data.path=clinics data.target=outcome partition=natural \
    participation.num_clients=null participation.per_round=2 rounds=3 metrics=classes
step "typing errors" misspelt
step "own network and method" "$python" "$day/gcfed/src/train.py" --config-dir conf $method $federation model._target_=mynet.small
step "sweep of λ and seeds" "$python" "$day/gcfed/src/train.py" --config-dir conf -m $method gc=gcfed $federation $network gc.lam=0.0,0.5,1.0 seed=1,2
step "from Python" "$python" compare.py

cd "$day/gcfed"
step "report" "$python" src/report.py "roots=[logs,$day/mine/logs]"
grep "10 runs: 10 finished" "$day/said.txt" # the demo, three runs, six of the sweep
for said in digits fruit clinics mobilenet_v3_small small Halved; do
    grep -q "$said" logs/report/index.html || { echo "first day: the report does not say $said"; exit 1; }
done
git diff --exit-code # nothing of the clone was edited
echo "first day: done in $SECONDS s"
