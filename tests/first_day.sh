#!/usr/bin/env bash
# A stranger's first day, for real: clone, demo, own images, torchvision's network, own network and method, sweep, report;
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
cat >halved.py <<'END'
import torch

from gcfed.federated.method import ServerPart


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
step "own images, torchvision's network" "$python" "$day/gcfed/src/train.py" $federation $network
step "own network and method" "$python" "$day/gcfed/src/train.py" --config-dir conf $method $federation model._target_=mynet.small
step "sweep of λ and seeds" "$python" "$day/gcfed/src/train.py" --config-dir conf -m $method $federation $network gc.lam=0.0,0.5,1.0 seed=1,2

cd "$day/gcfed"
step "report" $make report
grep "9 runs of .* settings: 9 finished" "$day/said.txt" # the demo, two runs, six of the sweep
for said in digits fruit mobilenet_v3_small small Halved; do
    grep -q "$said" logs/report/report.md || { echo "first day: the report does not say $said"; exit 1; }
done
git diff --exit-code # nothing of the clone was edited
echo "first day: done in $SECONDS s"
