"""The timed workloads: experiments of ``configs/`` on synthetic data of the real shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

import gcfed.folders.folder  # noqa: F401
from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets.datasets import synthetic
from gcfed.utils.files import replacing
from gcfed.utils.resolvers import ROOT


@dataclass(frozen=True)
class Workload:
    """One workload.

    Attributes:
        title: what it represents.
        overrides: of ``configs/train.yaml``.
        num_train, num_test: size of the synthetic data; None: as in the config.
        pairs: measured pairs of rounds, by default.
        populations: numbers of clients, each of which is run; empty: the config's.
    """

    title: str
    overrides: tuple[str, ...]
    num_train: int | None = None
    num_test: int | None = None
    pairs: int = 5
    populations: tuple[int, ...] = ()


# The settings of two other simulators, from their repositories: apple/pfl-research,
# benchmarks/image_classification/ configs/baseline.yaml, and microsoft/msrflute, README.md: one
# epoch of plain SGD. The sizes of W8 are not confirmed.
SGD = (
    "partition=iid",
    "client.epochs=1",
    "client.optimizer.momentum=0",
    "client.optimizer.weight_decay=0",
)
PEER = (
    *SGD,
    "client.optimizer.lr=0.1",
    "model=own",
    "model._target_=benchmarks.peers.CNN",
    "gc.boundary=fc2",
)

WORKLOADS = {
    "w1": Workload(
        "CIFAR-10 shapes, CNN, 5/100", ("experiment=cifar10_cnn_gcfed",), 50_000, 10_000
    ),
    "w2": Workload(
        "CIFAR-100 shapes, ResNet18-GN, 5/400",
        ("experiment=cifar100_resnet18_gcfed",),
        50_000,
        10_000,
        pairs=1,
    ),
    "w3": Workload(
        "TinyImageNet shapes, VGG11, 5/500",
        ("experiment=tinyimagenet_vgg11_gcfed",),
        100_000,
        10_000,
        pairs=1,
    ),
    "w4": Workload(
        "EMNIST shapes, MLP, 5/1000",
        ("experiment=emnist_mlp_gcfed", "partition.alpha=0.1"),
        697_932,
        116_323,
    ),
    "w5": Workload(
        "MLP, 10 of N clients with ten samples or fewer",
        (
            "data=synthetic",
            "partition=iid",
            "participation.per_round=10",
            "gc.boundary=fc2",
            "model.hidden=[64]",
        ),
        num_test=2_000,
        pairs=15,
        populations=(100, 1_000, 10_000, 100_000, 1_000_000),
    ),
    "w6": Workload(
        "pfl-research's CIFAR-10: 50 of 1,000 clients of 50 samples",
        (
            "data=cifar10",
            *PEER,
            "participation.num_clients=1000",
            "participation.per_round=50",
            "client.batch_size=10",
            "data.transform.crop_padding=0",
            "data.transform.flip=false",
        ),
        50_000,
        10_000,
    ),
    "w7": Workload(
        "FLUTE's federated EMNIST: 10 of 3,400 clients of 197 samples",
        (
            "data=synthetic",
            "data.input_shape=[1,28,28]",
            "data.num_classes=62",
            *PEER,
            "participation.num_clients=3400",
            "participation.per_round=10",
            "client.batch_size=20",
        ),
        671_585,
        77_483,
    ),
    "w8": Workload(
        "FLUTE's LR-MNIST: 10 of 1,000 clients of 62 samples",
        (
            "data=synthetic",
            "data.input_shape=[1,28,28]",
            *SGD,
            "client.optimizer.lr=0.03",
            "client.batch_size=10",
            "model.hidden=[]",
            "participation.num_clients=1000",
            "participation.per_round=10",
        ),
        61_664,
        7_371,
        pairs=15,
    ),
    "digits": Workload("the default run: 8×8 digits, MLP, 5/20", (), pairs=20),
    "vit": Workload(
        "CIFAR-10 shapes, ViT, 5/100, one epoch",
        ("experiment=cifar10_vit_gcfed", "client.epochs=1"),
        50_000,
        2_000,
    ),
    "gpt": Workload(
        "tiny Shakespeare, GPT, 5/299",
        ("experiment=tiny_shakespeare_gpt_gcfed", "data.limit_test=100"),
        pairs=15,
    ),
}


def drawn(num_classes: int, shape: list[int], num_train: int, num_test: int) -> FederatedDataset:
    """``synthetic`` data, from a file in .cache if there is one.

    W4's data take nine seconds to draw.
    """
    name = "_".join(map(str, (*shape, num_classes, num_train, num_test)))
    path = ROOT / ".cache" / "benchmarks" / f"{name}.npz"
    if not path.exists():
        data = synthetic(
            num_classes=num_classes, shape=shape, num_train=num_train, num_test=num_test
        )
        with replacing(path) as temporary:
            splits: dict[str, Any] = {
                "x": data.train.x,
                "y": data.train.y,
                "u": data.test.x,
                "v": data.test.y,
            }
            np.savez(temporary, **splits)
    with np.load(path) as kept:
        return FederatedDataset(
            "synthetic", num_classes, Split(kept["x"], kept["y"]), Split(kept["u"], kept["v"])
        )


def on_processors(processes: int) -> list[str]:
    """The overrides for so many processes, each on a processor."""
    if processes == 1:
        return ["trainer=cpu", "trainer.devices=1"]
    return ["trainer=ddp", "trainer.accelerator=cpu", f"trainer.devices={processes}"]


def by_phase(
    title: str, scale: float, digits: int, columns: Mapping[str, Mapping[str, float]]
) -> str:
    """Markdown: the seconds of each phase times ``scale``; the longest phases come first."""
    phases = {phase for seconds in columns.values() for phase in seconds}
    longest = sorted(phases, key=lambda phase: -max(s.get(phase, 0) for s in columns.values()))
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for phase in longest:
        cells = [f"{scale * s.get(phase, 0):,.{digits}f}" for s in columns.values()]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compose_workload(name: str, *overrides: str, clients: int | None = None) -> DictConfig:
    """The training config of a workload on synthetic data."""
    workload = WORKLOADS[name]
    more = () if clients is None else (f"participation.num_clients={clients}",)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", [*workload.overrides, *more, *overrides])
    if workload.num_test is None:
        return cfg
    sizes = {
        "num_classes": cfg.data.num_classes,
        "shape": cfg.data.input_shape,
        "num_test": workload.num_test,
    }
    if workload.num_train:
        own = {"_target_": "benchmarks.workloads.drawn", "num_train": workload.num_train}
    else:
        own = {
            "_target_": f"{synthetic.__module__}.synthetic",
            "num_train": 10 * (clients or 1_000),
        }
    with open_dict(cfg):
        cfg.data.dataset = {"_partial_": True, **own, **sizes}
    return cfg
