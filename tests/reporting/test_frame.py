"""Which runs are repetitions of each other, and the names of methods and settings."""

import pytest
from run_folders import GCFED, PLACE, run_of

from gcfed.reporting.frame import RUN_COLUMNS, frame_of


def methods(*runs):
    return [*frame_of(runs)["method"]]


def places(*runs):
    return [place.removeprefix(f"{PLACE}, ") for place in frame_of(runs)["place"]]


def test_runs_that_differ_by_seed_or_by_folder_are_repetitions():
    runs = [
        run_of(seed=3),
        run_of(seed=1, **{"paths.data_dir": "/data"}),
        run_of(seed=2, name="x", **{"metrics.a": 1}),
    ]
    frame = frame_of(runs)
    assert frame["setting"].nunique() == 1
    assert frame["method"][0] == "fedavg"
    assert frame["place"][0] == f"{PLACE}, 30 rounds"
    assert not frame["repeated"].any()


def drawn(seed, data_seed, **keys):
    """A run whose data has its own seed, which the config repeats."""
    return run_of(seed=seed, **keys, **{"data.seed": data_seed})


def test_runs_with_one_seed_of_the_data_are_repetitions():
    """Also the run whose own seed is the same: its config looks as if the data followed it."""
    fixed = [drawn(seed, 1) for seed in (1, 2, 3)]
    follow = [drawn(seed, seed, **{"client.epochs": 7}) for seed in (1, 2, 3)]
    frame = frame_of([*fixed, *follow, drawn(2, 4), drawn(4, 4), drawn(5, 4)])
    assert [*frame["setting"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert not frame["repeated"].any()
    # one that follows and one that does not are the same run
    frame = frame_of([drawn(1, 1), drawn(2, 2), drawn(3, 1), drawn(4, 1)])
    assert [*frame["setting"]] == [0, 0, 1, 1]


def test_rounds_and_tests_distinguish_settings():
    """The best of 30 tests and the best of 4 tests cannot be compared."""
    named = places(run_of(), run_of(eval_every=7), run_of(rounds=9))
    assert named == ["30 rounds, tested every 1", "30 rounds, tested every 7", "9 rounds"]
    paths = [f"/{'long/' * 12}{year}.npz" for year in (2023, 2024)]  # cut off, they would be equal
    assert places(*(run_of(**{"data.path": path}) for path in paths)) == [
        f"30 rounds, path {path}" for path in paths
    ]


@pytest.mark.parametrize(
    ("per_round", "num_clients", "words"),
    [
        (0.05, 100, "5 of 100 clients"),
        (0.001, 100, "1 of 100 clients"),
        (0.07, 10, "1 of 10 clients"),
        (7, 10, "7 of 10 clients"),
        (0.05, None, "5% of all clients"),
        (7, None, "7 of all clients"),
    ],
)
def test_a_place_has_the_number_of_clients_and_no_share(per_round, num_clients, words):
    shares = {"participation.per_round": per_round, "participation.num_clients": num_clients}
    (place,) = frame_of([run_of(**shares)])["place"]
    assert f", {words}, " in place


def test_the_latest_of_two_runs_with_the_same_seed_counts():
    old, new = (run_of(summary={"ended": f"2026-05-0{day}T00:00:00+00:00"}) for day in (1, 2))
    assert [*frame_of([new, run_of("unfinished"), old])["repeated"]] == [False, True, True]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("2026-05-01T12:30:00+02:00", "2026-05-01T11:00:00+00:00"),  # of two time zones
        ("2026-10-25T02:50:00+02:00", "2026-10-25T02:10:00+01:00"),  # summer time ends
        ("", "2026-05-01T11:00:00+00:00"),
        ("yesterday", "2026-05-01T11:00:00+00:00"),
    ],
)
def test_the_latest_run_is_that_of_the_latest_time(earlier, later):
    runs = [run_of(summary={"ended": ended}) for ended in (later, earlier)]
    assert [*frame_of(runs)["repeated"]] == [False, True]


def test_data_that_changed_between_runs_of_equal_settings_are_named(caplog):
    """Such as an edited CSV file. Seeds have other clients, and so other checksums."""

    def runs(*checksums):
        found = []
        for method, seed, data in zip("aabb", (1, 2, 1, 2), checksums, strict=True):
            summary = {"data": data, "ended": "2026-05-01T00:00:00+00:00"}
            found.append(run_of(seed=seed, summary=summary, **{"client.epochs": ord(method)}))
        return found

    frame_of(runs("one", "two", "one", "two"))
    frame_of(runs("one", None, "one", "two"))
    assert not caplog.text
    frame = frame_of(runs("one", "two", "one", "changed"))
    assert "of seed 2 have other samples, labels or clients" in caplog.text
    assert frame["place"].nunique() == 1


def test_runs_of_different_versions_are_named(caplog):
    """Also if one has recorded no version. A run that another one repeats does not count."""

    def warned(*versions, seeds=(1, 2)):
        caplog.clear()
        ended = "2026-05-01T00:00:00+00:00"
        runs = []
        for day, (seed, version) in enumerate(zip(seeds, versions, strict=True)):
            summary = {"ended": ended.replace("01T", f"0{day + 1}T")}
            if version:
                summary["version"] = version
            runs.append(run_of(seed=seed, summary=summary))
        assert frame_of(runs)["place"].nunique() == 1
        return "runs of different versions are compared" in caplog.text

    assert not warned("0.2.0", "0.2.0")
    assert not warned(None, None)
    assert warned("0.2.0", "0.3.0")
    assert warned("0.2.0", None)
    assert warned("0.2.0, 0.3.0", "0.3.0")
    assert not warned("0.2.0", "0.3.0", seeds=(1, 1))


def test_a_run_that_ended_counts_instead_of_a_later_one_that_did_not():
    """The later run had ended once. Then it was continued with more rounds, and failed."""
    ended, later = (f"2026-05-0{day}T00:00:00+00:00" for day in (1, 2))
    finished = run_of(summary={"ended": ended})
    failed = run_of("failed", summary={"ended": later})
    for runs in ([finished, failed], [failed, finished]):
        frame = frame_of(runs)
        assert [*frame["state"][~frame["repeated"]]] == ["finished"]
    # of two that have not ended, one is listed
    assert [*frame_of([run_of("failed"), run_of("unfinished")])["repeated"]] == [True, False]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            [{}, GCFED | {"gc.lam": 0.0}, GCFED | {"gc.lam": 0.5}],
            ["fedavg", "gcfed, λ 0", "gcfed, λ 0.5"],
        ),
        ([{"tags.algorithm": "fedacg", "server.momentum": 0.85}, {}], ["fedacg", "fedavg"]),
        (
            [GCFED | {"labels.algorithm": "FedProx", "labels.gc": "Local GC"}],
            ["FedProx + Local GC"],
        ),
        ([GCFED | {"labels.algorithm": "GC-Fed", "labels.gc": "GC-Fed"}], ["GC-Fed"]),
        ([{"methods.own._target_": "mine.Own"}, {}], ["fedavg + mine.Own", "fedavg"]),
        (
            [{"client.optimizer.lr": lr} for lr in (0.1, 0.013725923743207623)],
            ["fedavg, η 0.1", "fedavg, η 0.01373"],
        ),
        (
            [{"client.optimizer.lr": lr} for lr in (0.1234561, 0.1234562)],
            [f"fedavg, η 0.123456{i}" for i in (1, 2)],
        ),
        (
            [
                {"client.optimizer._target_": "torch.optim.Adam", "client.optimizer.eps": 1e-8},
                {"client.optimizer._target_": "torch.optim.SGD"},
            ],
            ["fedavg, Adam", "fedavg, SGD"],  # eps belongs to Adam
        ),
        (
            [{"client.epochs": e} for e in (1, 1, 1, 2)]
            + [{"client.epochs": 1, "client.clip_norm": 10}],
            ["fedavg", "fedavg", "fedavg", "fedavg, epochs 2", "fedavg, clip norm 10"],
        ),
    ],
)
def test_names_contain_only_what_differs(changes, names):
    found = methods(*(run_of(seed=seed, **change) for seed, change in enumerate(changes)))
    assert found == names


def test_attacks_and_partitions_are_settings():
    flip = {"attack._target_": "gcfed.attacks.byzantine.Scale", "attack.factor": -4.0}
    natural = {"partition._target_": "gcfed.data.partition.ByGroup", "partition.alpha": None}
    frame = frame_of([run_of(), run_of(**flip), run_of(**natural)])
    assert frame["method"].tolist() == ["fedavg"] * 3
    assert [place.removeprefix("digits, mlp, 5 of 20 clients, ") for place in frame["place"]] == [
        "Dirichlet 0.1, 30 rounds",
        "Dirichlet 0.1, 30 rounds, Scale",
        "ByGroup, 30 rounds",
    ]


def test_keys_with_the_names_of_columns_do_not_collide():
    """Another program's config may have them."""
    names = ("run", "setting", "place", "method", "repeated")
    frame = frame_of(run_of(**dict.fromkeys(names, value)) for value in ("a", "b"))
    assert frame["setting"].nunique() == 2
    assert [*frame.columns[: len(RUN_COLUMNS)]] == RUN_COLUMNS
    assert [*frame["repeated"]] == [False, False]


def test_without_runs_the_frame_is_empty():
    assert [*frame_of([]).columns] == RUN_COLUMNS
    assert frame_of([]).empty
