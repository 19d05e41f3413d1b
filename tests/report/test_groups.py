"""Which runs are repetitions of each other, what they are called, and their mean over seeds."""

from dataclasses import replace

import pytest
from run_folders import GCFED, PLACE, run_of

from gcfed.report.groups import compared, grouped
from gcfed.report.verdict import verdict
from gcfed.runs.measures import Sample, describe, sample


def methods(*runs):
    return [group.method for group in grouped(runs)]


def test_runs_that_differ_by_seed_or_by_place_are_one_group():
    runs = [run_of(seed=3), run_of(seed=1, **{"paths.data_dir": "/data"}), run_of(seed=2, name="x", **{"metrics.a": 1})]
    (group,) = grouped(runs)
    assert [run.seed for run in group.runs] == [1, 2, 3]
    assert (group.method, group.federation) == ("fedavg", f"{PLACE}, 30 rounds")
    assert grouped([replace(runs[0], config={})]) == []  # as of one that cannot be read


def test_how_long_and_how_often_tells_groups_apart():
    """The best of 30 tests and the best of 4 are two measures."""
    groups = grouped([run_of(), run_of(eval_every=7), run_of(rounds=9)])
    ends = ["30 rounds, tested every 1", "30 rounds, tested every 7", "9 rounds"]
    assert [group.federation for group in groups] == [f"{PLACE}, {end}" for end in ends]
    assert len({group.runs[0].setting for group in groups}) == 1


def test_runs_over_other_data_are_no_repetitions():
    first, again, other = (run_of(seed=s, summary={"classes": c}) for s, c in ((1, "aa"), (2, "aa"), (3, "bb")))
    stopped = run_of("unfinished", seed=4)
    groups = grouped([first, stopped, again, other])
    assert [group.runs for group in groups] == [(first, again, stopped), (other,)]
    assert groups[1].federation == f"{PLACE}, 30 rounds, samples bb"


def test_of_a_seed_run_twice_the_last_to_end_counts():
    old = run_of(summary={"ended": "2026-05-02T08:00:00+09:00"}, folder="/b", values=(0.1,))
    new = run_of(summary={"ended": "2026-05-02T00:00:00+00:00"}, folder="/a", values=(0.2,))
    stopped = run_of("unfinished", folder="/c", values=(0.3,))
    (group,) = grouped([new, stopped, old])
    assert (group.runs, set(group.repeated)) == ((new,), {old, stopped})
    measured = run_of(summary={"ended": "2026-05-01T00:00:00+00:00"}, **{"metrics.cka": {"every": 1}})
    assert grouped([new, measured])[0].runs == (measured,)  # the same run, and more is known of it


def test_names_say_what_differs_and_nothing_else():
    labels = {"tags.algorithm": "fedprox", "labels.algorithm": "FedProx", "labels.gc": "Local GC"}
    assert methods(run_of(**GCFED | labels)) == ["FedProx + Local GC"]
    lam = [run_of(**GCFED, **{"gc.lam": value}) for value in (0.0, 0.5)]
    assert methods(run_of(), *lam) == ["fedavg", "gcfed, λ 0", "gcfed, λ 0.5"]
    acg = {"tags.algorithm": "fedacg", "server.momentum": 0.85}  # what an algorithm is by itself is not said
    assert methods(run_of(), run_of(**acg)) == ["fedavg", "fedacg"]


def test_choices_are_called_as_in_the_configs_and_classes_bring_their_settings():
    """``attack=sign_flip`` is a scale of −4; what only one of the rules has is not said of it."""
    scale = {"attack._target_": "gcfed.attacks.byzantine.Scale", "attack.clients": 0.2}
    krum = {"aggregator._target_": "gcfed.aggregators.krum.MultiKrum", "aggregator.hostile": 0.2}
    mean = {"aggregator._target_": "gcfed.federated.aggregate.MeanAggregator", "aggregator.exact": True}
    flipped = scale | {"attack.factor": -4.0}
    runs = [run_of(**flipped, **krum), run_of(**flipped, **mean, **{"aggregator.weighting": "uniform"})]
    runs += [run_of(**scale, **mean, **{"attack.factor": 10.0, "aggregator.weighting": "samples"}), run_of()]
    named = {(group.method, group.federation.removeprefix(f"{PLACE}, 30 rounds, ")) for group in grouped(runs)}
    assert named == {
        ("fedavg, multi krum", "sign flip"), ("fedavg, mean", "sign flip"),
        ("fedavg", "scale"), ("fedavg", "no attack"),
    }  # fmt: skip
    assert methods(*(run_of(**krum | {"aggregator.hostile": share}) for share in (0.1, 0.2))) == [
        "fedavg, aggregator hostile 0.1", "fedavg, aggregator hostile 0.2",
    ]  # fmt: skip
    natural = {"partition._target_": "gcfed.data.partition.ByGroup", "partition.alpha": None}
    own = {"partition._target_": "mine.OwnPartition", "partition.alpha": None}
    validated = [run_of(), run_of(**{"data.validation": 0.1})]
    places = [
        ", ".join([*group.places.values()][3:]) for group in grouped([run_of(**natural), run_of(**own), *validated])
    ]
    assert places == [
        "natural, 30 rounds", "mine.OwnPartition, 30 rounds", "Dirichlet 0.1, 30 rounds, no validation split",
        "Dirichlet 0.1, 30 rounds, validation split 0.1",
    ]  # fmt: skip


def test_a_users_own_method_has_a_name_of_its_own():
    """A YAML on top of ``fedavg`` inherits its label, a method on the command line its tag too."""
    ours, half = {"labels.algorithm": "FedAvg", "labels.gc": "GC-Fed"}, {"methods.half._target_": "mine.Half"}
    ntd = {"methods.ntd._target_": "gcfed.methods.fedntd.FedNTD"}
    scaffold = {"tags.algorithm": "scaffold", "labels.algorithm": "SCAFFOLD"}
    scaffold |= {"methods.scaffold._target_": "gcfed.methods.scaffold.Scaffold"}
    for more, gc, name in (
        (half, {}, "FedAvg + Half"),
        (half, GCFED, "FedAvg + Half + GC-Fed"),
        (half | {"tags.algorithm": "half"}, {}, "half"),
        (half | {"labels.algorithm": "Half"}, GCFED, "Half + GC-Fed"),
        (scaffold | ntd, {}, "SCAFFOLD + FedNTD"),
        (scaffold, {}, "SCAFFOLD"),
        ({}, GCFED | {"tags.gc": "own"}, "own"),
    ):
        assert methods(run_of(**ours | more | gc)) == [name]
    other = {"methods.half._target_": "other.Half"}
    names = methods(*(run_of(**ours | more) for more in (half, other, {})))
    assert names == ["FedAvg + Half, mine.Half", "FedAvg + Half, other.Half", "FedAvg"]
    assert verdict(grouped([run_of(**ours), run_of(values=(0.9,), **ours | half)])).reference == 1  # FedAvg as it is


def test_one_odd_run_does_not_lengthen_the_others_names():
    adam = {f"client.optimizer.{k}": v for k, v in {"_target_": "torch.optim.Adam", "lr": 0.001, "eps": 1e-8}.items()}
    names = methods(run_of(), run_of(**{"client.epochs": 1}), run_of(**{"client.epochs": 2}), run_of(**adam))
    assert names == ["fedavg, epochs 5", "fedavg, epochs 1", "fedavg, epochs 2", "fedavg, Adam, epochs 5"]


def test_numbers_of_a_search_have_the_digits_that_tell_them_apart():
    rates = (0.1, 0.013725923743207623, 0.013741120005912, 1.3725923743207623e-05)
    runs = [run_of(**{"client.optimizer.lr": rate}) for rate in rates]
    assert methods(*runs) == [f"fedavg, η {rate}" for rate in ("0.1", "0.01373", "0.01374", "1.373e-05")]


@pytest.mark.parametrize(
    "difference",
    [
        {"partition._target_": "gcfed.data.partition.DirichletBalanced"}, {"partition.alpha": 0.1000001},
        {"participation.num_clients": None}, {"client.clip_norm": 10.0}, {"model.hidden": [64, 64]}, {"rounds": 31},
        {"precision": "64-true"}, {"tags.data": "cifar10", "data.num_classes": 10},
    ],
    ids=str,
)  # fmt: skip
def test_every_difference_makes_a_group_with_a_label_of_its_own(difference):
    groups = grouped([run_of(), run_of(**difference)])
    assert len({(group.method, group.federation) for group in groups}) == len(groups) == 2


def test_mean_and_deviation_over_seeds_by_hand():
    runs = [run_of(seed=seed, values=(0.1, last)) for seed, last in ((1, 0.5), (2, 0.7))]
    lost = [run_of("failed", seed=4), run_of("unfinished", seed=5), run_of("diverged", seed=6, values=(0.1, 0.6))]
    (group,) = grouped([*runs, *lost])
    s = sample(group.runs, "last:test/acc", 100.0)
    assert (s.mean, s.std) == (pytest.approx(60), pytest.approx(10))
    assert describe("last:test/acc").cell(group.runs, s, 5) == "60.00 (10.00) [3 of 5] †"
    assert s.record["seeds"] == "1 2 6"
    assert sample(runs[:1], "max:test/nothing") == Sample({})


def test_a_target_that_was_not_reached_is_a_bound():
    runs = [run_of(seed=1, values=(0.2, 0.8, 0.9)), run_of(seed=2, values=(0.2, 0.3, 0.4, 0.5))]
    (group,) = grouped([*runs, run_of("unfinished", seed=3, values=(0.1,))])
    s = sample(group.runs, "rounds:test/acc>=0.7")
    assert (dict(s.values), s.mean, s.std, s.bound) == ({1: 2.0, 2: 4.0}, 3.0, None, True)
    assert not sample(runs[:1], "rounds:test/acc>=0.7").bound
    sent = {"comm/down_bytes": 6, "comm/up_bytes": 4}
    runs = [run_of(seed=s, summary={"bytes_to_target": {"0.7": b}, **sent}) for s, b in ((1, 5), (2, None))]
    s = sample(runs, "bytes_to_target/0.7")
    assert (dict(s.values), s.mean, s.bound) == ({1: 5.0, 2: 10.0}, 7.5, True)
    runs = [run_of(seed=s, summary={"client_seconds_to_target": {"0.7": t}}) for s, t in ((1, 5), (2, None))]
    assert sample(runs, "client_seconds_to_target/0.7").bound  # what it took in all is not known


def test_federations_come_by_how_much_they_compare_and_lone_settings_last():
    lone = [run_of(rounds=1, seed=seed) for seed in range(9)]
    two = [run_of(rounds=2, seed=seed, **more) for seed in (1, 2) for more in ({}, GCFED)]
    three = [run_of(rounds=3, seed=seed, **more) for seed in (1, 2, 3) for more in ({}, GCFED)]
    lost = [run_of(rounds=4, seed=seed) for seed in range(9)] + [run_of("failed", rounds=4, **GCFED)]
    groups = grouped([*lone, *lost, *two, *three])
    assert [group.runs[0].planned for group in groups] == [3, 3, 2, 2, 1, 4, 4]
    assert [compared(groups[:2]), compared(groups[2:4]), compared(groups[4:5]), compared(groups[5:])] == [6, 4, 0, 0]
