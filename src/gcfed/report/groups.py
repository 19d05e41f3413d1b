"""Runs that differ by seed only, under a name that says in what they differ from the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcfed.report.runs import Run
from gcfed.utils.settings import IDENTITY, flat

NAMES = {
    "fedacg": "FedACG", "fedadagrad": "FedAdagrad", "fedadam": "FedAdam", "fedavg": "FedAvg", "fedavgm": "FedAvgM",
    "fedcm": "FedCM", "fedcurv": "FedCurv", "feddc": "FedDC", "feddecorr": "FedDecorr", "feddyn": "FedDyn",
    "fedgc": "FedGC", "fedlc": "FedLC", "fedmlb": "FedMLB", "fedntd": "FedNTD", "fedpaq": "FedPAQ",
    "fedprox": "FedProx", "fedreg": "FedReg", "fedsam": "FedSAM", "fedsol": "FedSOL", "fedsub": "FedSub",
    "fedvarp": "FedVARP", "fedyogi": "FedYogi", "moon": "MOON", "scaffold": "SCAFFOLD", "ssf": "SSF",
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet", "emnist": "EMNIST",
    "mnist": "MNIST", "digits": "digits", "cnn": "CNN", "mlp": "MLP", "vgg11": "VGG11", "resnet18": "ResNet18",
    "resnet9": "ResNet-9", "resnet110": "ResNet-110", "lstm": "LSTM",
}  # fmt: skip
GC_NAMES = {"local": "Local GC", "global": "Global GC", "gcfed": "GC-Fed"}
SYMBOLS = {"gc.lam": "λ", "client.optimizer.lr": "η", "client.epochs": "epochs", "client.batch_size": "batch",
           "methods.proximal.mu": "μ"}  # fmt: skip
# Where data lie, how many clients train at once, and what other keys say already: none makes another setting.
_ELSEWHERE = (
    "seed", "client_store.", "client.stack", "data.seed", "data.rounds", "data.num_clients", "data.partitioner",
    "data.eval_batch_size", "data.dataset.data_dir", "data.dataset.download", "participation.sampler.",
    "model.input_shape", "model.num_classes", "task.",
)  # fmt: skip
TAGS = ("tags.data", "tags.model", "tags.algorithm", "tags.gc")
_TOLD = ("tags.", "participation.", "partition.", "rounds")  # by the method's name and by the federation


@dataclass(frozen=True)
class Group:
    """Repetitions of one setting, by ascending seed.

    ``method`` names what differs in the algorithm, ``federation`` what differs in data, model, participation,
    partition and rounds ("" where nothing does); ``label`` is both, unique among the groups made together.
    """

    method: str
    federation: str
    setting: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.method, self.federation)))


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Groups in the order of their first runs."""
    settings: dict[str, dict[str, Any]] = {}
    members: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        setting = setting_of(run)
        key = repr(sorted(setting.items()))
        settings[key] = setting
        members[key].append(run)
    methods, federations = _methods(list(settings.values())), _federations(list(settings.values()))
    return [
        Group(method, federation, setting, tuple(sorted(members[key], key=lambda run: run.seed)))
        for method, federation, (key, setting) in zip(methods, federations, settings.items(), strict=True)
    ]


def setting_of(run: Run) -> dict[str, Any]:
    """Everything of the config that changes the run's numbers, but the seed: dotted key → value."""
    leaves = flat({key: run.config[key] for key in ("tags", "rounds", *IDENTITY) if key in run.config})
    kept = {k: tuple(v) if isinstance(v, list) else v for k, v in leaves.items() if not k.startswith(_ELSEWHERE)}
    return {k: v for k, v in kept.items() if v is not None and v != {}}


def method_name(setting: Mapping[str, Any]) -> str:
    """``FedAvg``, ``GC-Fed`` (which is FedAvg with gc=gcfed), ``FedProx + Local GC``."""
    algorithm, gc = str(setting.get("tags.algorithm", "?")), str(setting.get("tags.gc", "none"))
    name = NAMES.get(algorithm, algorithm)
    if gc == "none":
        return name
    gc_name = GC_NAMES.get(gc, f"gc={gc}")
    return gc_name if algorithm == "fedavg" else f"{name} + {gc_name}"


def federation_of(setting: Mapping[str, Any]) -> tuple[str, ...]:
    """Data, model, participation, partition, rounds, as one says them: CIFAR-10, CNN, 5/100, α 0.1, 800 rounds."""
    partition = str(setting.get("partition._target_", "")).rsplit(".", 1)[-1]
    parameters = [
        f"{k[10:]} {_shown(v)}" for k, v in setting.items() if k.startswith("partition.") and k[10:] in _PARTED
    ]
    return (
        *(NAMES.get(name, name) for name in (str(setting.get("tags.data")), str(setting.get("tags.model")))),
        f"{setting.get('participation.per_round')}/{setting.get('participation.num_clients', 'all')}",
        " ".join([PARTITIONS.get(partition, partition), *parameters]).strip().replace("alpha", "α"),
        f"{setting.get('rounds')} rounds",
    )


_PARTED = ("alpha", "classes_per_client")
PARTITIONS = {"Dirichlet": "", "DirichletBalanced": "balanced", "IID": "i.i.d."}


def _federations(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = [federation_of(s) for s in settings]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return [", ".join(part for part, told in zip(row, differ, strict=True) if told) for row in parts]


def _methods(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Beside the name, keys in which settings with the same data, model, algorithm and GC differ.

    Not those in which algorithms differ from each other: that FedACG's server has momentum is what FedACG is.
    """
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for s in settings:
        alike[tuple(s.get(tag) for tag in TAGS)].append(s)
    names = []
    for s in settings:
        siblings = alike[tuple(s.get(tag) for tag in TAGS)]
        keys = dict.fromkeys(key for t in siblings for key in t if not key.startswith(_TOLD))
        differ = [k for k in keys if len({repr(t.get(k)) for t in siblings}) > 1]
        names.append(", ".join([method_name(s), *(f"{_key(k)} {_shown(s.get(k))}" for k in differ)]))
    return names


def _key(key: str) -> str:
    return SYMBOLS.get(key, key.removeprefix("methods.").removeprefix("client.optimizer."))


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
