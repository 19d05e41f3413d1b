"""Runs that differ by seed only, under a name that says in what they differ from the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
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
           "methods.proximal.mu": "μ", "methods.ssf.ratio": "r/d", "methods.fedsub.ratio": "r/d"}  # fmt: skip
# Where data lie, how many clients train at once, and what other keys say already: none makes another setting.
_ELSEWHERE = (
    "seed", "client_store.", "client.stack", "data.seed", "data.rounds", "data.num_clients", "data.partitioner",
    "data.eval_batch_size", "data.dataset.data_dir", "data.dataset.download", "participation.sampler.per_round",
    "model.input_shape", "model.num_classes", "task.",
)  # fmt: skip
TAGS = ("tags.data", "tags.model", "tags.algorithm", "tags.gc")
_DATA = ("data.", "model.")
_TESTS = "eval_every"  # changes no number of a run, but what one reads of it: the best of 800 tests is not that of 40
_FEDERATION = ("participation.", "partition.", _TESTS)
_TOLD = ("tags.", "rounds", *_FEDERATION, *_DATA)  # by the method's name and by the federation


@dataclass(frozen=True)
class Group:
    """Repetitions of one setting that were tested equally often, by ascending seed.

    ``method`` names what differs in the algorithm, ``federation`` what differs in data, model, participation,
    partition, rounds and tests ("" where nothing does); ``label`` is both, unique among the groups made together.
    """

    method: str
    federation: str
    setting: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.method, self.federation)))


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Groups in the order of their first runs; runs whose config cannot be read are in none."""
    settings: dict[str, dict[str, Any]] = {}
    members: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if not run.config:
            continue
        setting = setting_of(run) | ({_TESTS: run.get(_TESTS)} if _TESTS in run.config else {})
        key = repr(sorted(setting.items()))
        settings[key] = setting
        members[key].append(run)
    methods, federations = method_names(list(settings.values())), federation_names(list(settings.values()))
    return [
        Group(method, federation, setting, tuple(sorted(members[key], key=lambda run: run.seed)))
        for method, federation, (key, setting) in zip(methods, federations, settings.items(), strict=True)
    ]


def setting_of(run: Run) -> dict[str, Any]:
    """Everything of the config that changes the run's numbers, but the seed: dotted key → value."""
    leaves = flat({key: run.config[key] for key in ("rounds", *IDENTITY) if key in run.config})
    leaves = {tag: run.get(tag) for tag in TAGS} | leaves  # no other tag: a note of one's own changes no number
    kept = {k: _plain(v) for k, v in leaves.items() if not k.startswith(_ELSEWHERE)}
    return {k: v for k, v in kept.items() if v is not None and v != {}}


def _plain(value: Any) -> Any:
    """``gc.lam=1`` and ``gc.lam=1.0`` are one setting."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
    parameters = [f"{name} {_shown(setting[key])}" for key, name in _PARTED.items() if key in setting]
    dynamic = " dynamic" if str(setting.get("participation.sampler._target_")).endswith("DynamicPopulation") else ""
    return (
        *(NAMES.get(name, name) for name in (str(setting.get("tags.data")), str(setting.get("tags.model")))),
        f"{setting.get('participation.per_round')}/{setting.get('participation.num_clients', 'all')}{dynamic}",
        " ".join(filter(None, [PARTITIONS.get(partition, partition), *parameters])),
        f"{setting.get('rounds')} rounds",
    )


_PARTED = {"partition.alpha": "α", "partition.classes": "classes"}
PARTITIONS = {"Dirichlet": "", "DirichletBalanced": "balanced", "IID": "i.i.d.", "ClassesPerClient": "",
              "ByGroup": "natural"}  # fmt: skip


def federation_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs of :func:`federation_of`, of the data and of the model, and what else tells two of them apart."""
    parts = [federation_of(s) for s in settings]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    of_data = _differing(settings, [part[:2] for part in parts], lambda key: key.startswith(_DATA))
    further = _differing(settings, parts, lambda key: key.startswith(_FEDERATION))
    return [
        ", ".join([*compress(part, differ), *data, *more])
        for part, data, more in zip(parts, of_data, further, strict=True)
    ]


def method_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Beside the name, keys in which settings with the same data, model, algorithm and GC differ.

    Not those in which algorithms differ from each other: that FedACG's server has momentum is what FedACG is.
    """
    tags = [tuple(s.get(tag) for tag in TAGS) for s in settings]
    further = _differing(settings, tags, lambda key: not key.startswith(_TOLD))
    return [", ".join([method_name(s), *more]) for s, more in zip(settings, further, strict=True)]


def _differing(
    settings: Sequence[Mapping[str, Any]], kinds: Sequence[tuple[Any, ...]], told: Callable[[str], bool]
) -> list[list[str]]:
    """For each setting, "key value" of the keys that ``told`` admits, it has, and settings of its kind differ in."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for s, kind in zip(settings, kinds, strict=True):
        alike[kind].append(s)
    keys = {
        kind: [
            key
            for key in dict.fromkeys(key for s in siblings for key in s)
            if told(key) and len({repr(s.get(key)) for s in siblings}) > 1
        ]
        for kind, siblings in alike.items()
    }
    return [
        [f"{_key(k)} {_shown(s[k])}" for k in keys[kind] if k in s] for s, kind in zip(settings, kinds, strict=True)
    ]


def _key(key: str) -> str:
    if key.startswith(_DATA):
        return key.rpartition(".")[2]
    return SYMBOLS.get(key, key.removeprefix("methods.").removeprefix("client.optimizer."))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)
