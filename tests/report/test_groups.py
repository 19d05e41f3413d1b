"""Which runs are repetitions of each other, and what they are called."""

from pathlib import Path

import pytest
from run_folders import CONFIG

from gcfed.report.groups import federation_of, grouped, method_name, setting_of
from gcfed.report.runs import Run


def run_of(**config) -> Run:
    """A run with dotted keys over the tests' config; its files do not matter here."""
    tree = {k: dict(v) if isinstance(v, dict) else v for k, v in CONFIG.items()} | {"rounds": 30}
    tree["client"] = {**CONFIG["client"], "optimizer": dict(CONFIG["client"]["optimizer"])}
    for key, value in config.items():
        node = tree
        *parents, leaf = key.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return Run(Path("/nowhere"), tree, (), {}, {}, "finished", "")


def labels(*runs: Run) -> list[str]:
    return [group.label for group in grouped(runs)]


GCFED = {"tags__gc": "gcfed", "gc___target_": "gcfed.methods.centralization.GradientCentralization"}


def test_runs_that_differ_by_seed_or_by_place_are_one_group():
    runs = [
        run_of(seed=3),
        run_of(seed=1, paths__data_dir="/data", client_store__kind="disk", client__stack=5, trainer__devices=2),
        run_of(seed=2, data__eval_batch_size=100, targets=[0.1], metrics__drift=1, name="x"),
        run_of(seed=4, client__epochs=5.0, participation__sampler__per_round=7),
    ]
    (group,) = grouped(runs)
    assert [run.seed for run in group.runs] == [1, 2, 3, 4]
    assert (group.method, group.federation, group.label) == ("FedAvg", "", "FedAvg")
    assert "seed" not in group.setting
    assert group.setting["client.optimizer.lr"] == 0.01


def test_how_often_a_run_was_tested_tells_groups_apart():
    """The best of 30 tests and the best of 4 are two measures; one seed twice is no repetition then."""
    runs = [run_of(), run_of(eval_every=7), run_of(seed=2, eval_every=7), run_of(tags__gc="gcfed")]
    assert [(g.method, g.federation, len(g.runs)) for g in grouped(runs)] == [
        ("FedAvg", "eval_every 1", 1), ("FedAvg", "eval_every 7", 2), ("GC-Fed", "eval_every 1", 1),
    ]  # fmt: skip
    assert "eval_every" not in setting_of(runs[0])  # a study continues a run whatever its tests


def test_runs_without_a_readable_config_are_in_no_group():
    assert grouped([Run(Path("/nowhere"), {}, (), {}, {}, "failed", "its files cannot be read")]) == []
    assert grouped([]) == []


@pytest.mark.parametrize(
    ("algorithm", "gc", "name"),
    [
        ("fedavg", "none", "FedAvg"),
        ("fedavg", "gcfed", "GC-Fed"),
        ("fedavg", "local", "Local GC"),
        ("fedprox", "none", "FedProx"),
        ("fedprox", "global", "FedProx + Global GC"),
        ("mine", "odd", "mine + gc=odd"),
    ],
)
def test_method_names(algorithm, gc, name):
    assert method_name({"tags.algorithm": algorithm, "tags.gc": gc}) == name


def test_what_differs_is_told_and_nothing_else():
    runs = [run_of(), run_of(**GCFED), run_of(**GCFED, gc__lam=0.5), run_of(**GCFED, gc__lam=0.5, rounds=800)]
    assert labels(*runs) == [
        "FedAvg, 30 rounds",
        "GC-Fed, 30 rounds",
        "GC-Fed, λ 0.5, 30 rounds",
        "GC-Fed, λ 0.5, 800 rounds",
    ]


def test_an_algorithms_own_settings_are_not_told():
    runs = [run_of(), run_of(tags__algorithm="fedacg", server__momentum=0.85, methods__proximal__mu=0.001)]
    assert labels(*runs) == ["FedAvg", "FedACG"]
    assert labels(*runs, run_of(tags__algorithm="fedacg", server__momentum=0.9, methods__proximal__mu=0.001)) == [
        "FedAvg",
        "FedACG, server.momentum 0.85",
        "FedACG, server.momentum 0.9",
    ]


def test_federations_as_one_says_them():
    def federation(**config):
        return federation_of(setting_of(run_of(**config)))

    assert federation() == ("digits", "MLP", "5/20", "α 0.1", "30 rounds")
    balanced = {"partition___target_": "gcfed.data.partition.DirichletBalanced", "partition__alpha": 0.3}
    assert federation(tags__data="cifar10", **balanced)[::3] == ("CIFAR-10", "balanced α 0.3")
    assert federation(partition={"_target_": "gcfed.data.partition.IID"})[3] == "i.i.d."
    classes = {"_target_": "gcfed.data.partition.ClassesPerClient", "classes": 1}
    assert federation(partition=classes)[3] == "classes 1"
    assert federation(partition={"_target_": "gcfed.data.partition.ByGroup"}, participation__num_clients=None)[2:4] == (
        "5/all",
        "natural",
    )
    dynamic = {"participation__sampler___target_": "gcfed.data.sampling.DynamicPopulation"}
    assert federation(**dynamic)[2] == "5/20 dynamic"


@pytest.mark.parametrize(
    "difference",
    [
        {"partition__min_size": 10},
        {"partition___target_": "gcfed.data.partition.DirichletBalanced"},
        {"partition__alpha": 0.1000001},
        {"participation__sampler___target_": "gcfed.data.sampling.DynamicPopulation"},
        {"participation__sampler__live": 100},
        {"participation__num_clients": None},
        {"precision": "bf16-mixed"},
        {"client__optimizer__lr": 0.010000001},
        {"client__steps": 3},
        {"data__limit_train": 100},
        {"model__hidden": [64, 64]},
        {"methods__new__beta": 1},
        {"quantization__bits": 4},
        {"tags__data": "cifar10"},
        {"tags__model": "cnn"},
        {"rounds": 31},
        {"eval_every": 7},
    ],
    ids=str,
)
def test_every_difference_makes_a_group_with_a_label_of_its_own(difference):
    runs = [run_of(), run_of(**difference)]
    assert len(set(labels(*runs))) == 2
    assert all(labels(*runs))


def test_a_large_sweep_is_named_at_once():
    runs = [run_of(**GCFED, gc__lam=i / 1000) for i in range(600)]
    assert len(set(labels(*runs))) == 600
