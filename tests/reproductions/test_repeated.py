"""The pages of repeated small runs: their tables are their runs', and their claims follow."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from planned import letters
from scipy import stats

from gcfed.tables.plan import make_plan
from gcfed.tables.reading import load
from gcfed.tables.records import Selection
from gcfed.utils.resolvers import ROOT
from reproductions.results import figures, repeated
from reproductions.results.figures import numbers, table
from reproductions.results.repeated import FEDDPC, RATIOS, SEARCH_SEED
from reproductions.stored import seed_of, stored_runs


def page(name):
    return (ROOT / f"reproductions/results/{name}").read_text()


def tail(run, column="test/acc"):
    """The mean of the last ten rounds in percent, without the page's functions."""
    rows = run.metrics[run.metrics.index > run.metrics.index.max() - 10]
    return 100 * rows[column].dropna().mean()


def settings(run):
    """The last value of each override, without what a machine adds."""
    found = dict(word.partition("=")[::2] for word in run.overrides)
    return {key: value for key, value in found.items() if key != "seed"}


def of_feddpc(label):
    """The trials by their rate, and the runs by their seed, of a row."""
    trials = {}
    finals = {}
    for run in stored_runs("feddpc").values():
        if {*FEDDPC[label]} <= {*run.overrides}:
            if seed_of(run) == SEARCH_SEED:
                trials[settings(run)["client.optimizer.lr"]] = run
            else:
                finals[seed_of(run)] = run
    return trials, finals


@pytest.mark.parametrize("label", FEDDPC)
def test_the_runs_of_feddpc_have_the_best_rate_of_its_search(label):
    trials, finals = of_feddpc(label)
    assert {*finals} == {1, 2, 3}
    accuracies = {rate: tail(run, "val/acc") for rate, run in trials.items()}
    assert len(accuracies) == 3
    best = max(accuracies, key=accuracies.get)
    assert {settings(run)["client.optimizer.lr"] for run in finals.values()} == {best}
    for run in [*trials.values(), *finals.values()]:
        assert not run.metrics["train/nonfinite_clients"].any()
        assert not run.metrics["train/refused_steps"].any()


@pytest.mark.parametrize("label", FEDDPC)
def test_the_runs_of_feddpc_are_those_of_its_table(label):
    """The stored overrides are the table's, with the rate."""
    _, finals = of_feddpc(label)
    jobs = make_plan(load("feddpc"), "small", Selection(), []).jobs.values()
    planned = [{*job.overrides} for job in jobs if {*FEDDPC[label]} <= {*job.overrides}]
    for seed, run in finals.items():
        (own,) = [words for words in planned if f"seed={seed}" in words]
        rate = settings(run)["client.optimizer.lr"]
        assert {*run.overrides} == own | {f"client.optimizer.lr={rate}"}


def feddpc(label):
    return np.array([tail(run) for _, run in sorted(of_feddpc(label)[1].items())])


def test_the_differences_on_feddpcs_page_follow_from_its_runs():
    text = page("feddpc.md")
    globally = feddpc("FedAvg with Global GC")
    for a, b, printed in (
        (globally, feddpc("FedDPC"), r"above FedDPC at each seed, by (.*?)\)"),
        (feddpc("FedDPC with Global GC"), globally, r"FedDPC with Global GC is (.*?)\)"),
        (feddpc("FedAvg with GC-Fed"), globally, r"GC-Fed is level .*? \((.*?)\)"),
    ):
        gains = a - b
        half = stats.t.ppf(0.975, 2) * stats.sem(gains)
        ends = [gains.mean() - half, gains.mean() + half]
        *first, low, high = [
            float(word.replace("−", "-"))
            for word in re.findall(r"[−+]?\d+\.\d+", re.search(rf"- .*{printed}", text)[1])
        ]
        assert [low, high] == pytest.approx(ends, abs=0.051)
        expected = gains if len(first) == 3 else [abs(gains.mean())]
        assert np.abs(first) == pytest.approx(expected, abs=0.051)
    assert (globally > feddpc("FedDPC")).sum() >= 2
    assert abs(np.mean(feddpc("FedDPC") - feddpc("FedAvg"))) <= 2
    assert abs(np.mean(feddpc("FedDPC with Global GC") - globally)) <= 1.5


def test_the_index_has_feddpcs_gains():
    gains = {label: numbers(above)[0] for label, _, _, above in table("feddpc.md", 0) if above}
    assert f"No: {gains['FedDPC']} points, Global GC {gains['FedAvg with Global GC']}. " in page(
        "README.md"
    )


def of_warmup(*words):
    """{λ or warm-up: [accuracy of each seed]}, without the page's functions."""
    found = {}
    for run in sorted(stored_runs("gc-warmup").values(), key=seed_of):
        if {*words} <= {*run.overrides}:
            name = settings(run).get("gc.lam", "warm-up")
            found.setdefault(name, []).append(tail(run))
    return found


@pytest.mark.parametrize("words", ["experiment=digits_mlp_gcfed", "data=mnist"])
def test_the_plan_of_the_warmup_holds_in_its_stored_runs(words):
    """The warm-up is within a standard deviation of the best λ, and no run diverges."""
    found = of_warmup(words)
    assert {len(seeds) for seeds in found.values()} == {3}
    warmup = found.pop("warm-up")
    best = max(found.values(), key=np.mean)
    assert np.mean(warmup) >= np.mean(best) - np.std(best, ddof=1)
    assert min(min(seeds) for seeds in [warmup, *found.values()]) > 50


def test_the_page_of_the_warmup_compares_with_the_best_lambda():
    """0.2 points below the best λ on the digits, 0.1 above on MNIST."""
    gaps = []
    for words in ("experiment=digits_mlp_gcfed", "data=mnist"):
        found = of_warmup(words)
        warmup = np.mean(found.pop("warm-up"))
        gaps.append(warmup - max(np.mean(seeds) for seeds in found.values()))
    text = page("gc-warmup.md")
    assert f"{-gaps[0]:.1f} points below on the digits" in text
    assert f"{gaps[1]:.1f} and 0.4 above on MNIST and MNIST-M" in text


def figures_runs(*words):
    runs = stored_runs("figures").values()
    return [run for run in runs if {*words} <= {*run.overrides}]


def test_the_claims_on_the_small_figures_follow_from_their_runs():
    distances = {}
    for run in figures_runs("metrics=gap"):
        kind = settings(run)["partition"]
        count = int(settings(run)["participation.per_round"])
        distances.setdefault((kind, count), []).append(run.metrics["gap/l2"].dropna().mean())
    assert {len(seeds) for seeds in distances.values()} == {2}
    for kind in ("dirichlet", "iid"):
        means = [np.mean(distances[kind, count]) for count in (5, 10, 20, 50)]
        assert means == sorted(means, reverse=True)
        assert (np.array(means) >= [np.mean(distances["iid", n]) for n in (5, 10, 20, 50)]).all()
    (fedacg,) = figures_runs("metrics=[drift,cka]", "algorithm=fedacg")
    others = figures_runs("metrics=[drift,cka]", "algorithm=fedavgm")
    assert len(others) == 2
    for run in others:
        assert run.metrics["drift/divergence"].mean() > fedacg.metrics["drift/divergence"].mean()
    for run in figures_runs("metrics=leakage"):
        assert (run.metrics["leakage/labels"].dropna() == 1).all()
        assert (run.metrics["leakage/psnr"].dropna() > 20).all()


@pytest.mark.parametrize("heterogeneity", ["low", "medium"])
def test_scaffolds_best_rate_is_the_index_rate(heterogeneity):
    errors = {}
    for run in figures_runs("algorithm=scaffold", f"heterogeneity={heterogeneity}"):
        error = run.metrics["test/relative_error"].iloc[-1]
        errors[settings(run)["client.optimizer.lr"]] = error if np.isfinite(error) else np.inf
    assert len(errors) == 7
    assert min(errors, key=errors.get) == "0.005"


# ---------------------------------------------------------------------------------- ssf.md
def errors_of_ssf(*words):
    """The mean of the last relative errors over three seeds, without the page's functions."""
    runs = [run for run in stored_runs("ssf").values() if {*words} <= {*run.overrides}]
    assert {seed_of(run) for run in runs} == {1, 2, 3}
    return np.mean([run.metrics["test/relative_error"].iloc[-1] for run in runs])


def test_ssf_is_below_scaffolds_error_from_a_fifth_of_the_directions_on():
    level = "heterogeneity=medium"
    scaffold = errors_of_ssf(level, "algorithm=scaffold")
    for ratio in ("0.2", "0.5"):
        assert errors_of_ssf(level, f"methods.ssf.ratio={ratio}") < scaffold
    assert errors_of_ssf(level, "methods.ssf.ratio=0.01") > 40 * scaffold


def test_no_run_of_ssfs_page_diverges():
    for run in stored_runs("ssf").values():
        assert run.metrics["test/relative_error"].iloc[-1] < 1, run.name
        assert not run.metrics["train/nonfinite_clients"].any(), run.name


def test_the_picture_of_ssf_has_the_errors_of_its_table(unrendered):
    figure = Figure()
    figures.ssf(figure)
    (axes,) = figure.axes
    (line,) = [line for line in axes.lines if line.get_label() == "SSF"]
    assert [*line.get_xdata()] == [0.01, 0.05, 0.1, 0.2, 0.5]
    for ratio, drawn in zip(RATIOS, line.get_ydata(), strict=True):
        error = errors_of_ssf("heterogeneity=medium", f"methods.ssf.ratio={ratio}")
        assert drawn == pytest.approx(1000 * error, rel=0.01)


# ------------------------------------------------------------------------------- robust.md
def test_the_runs_of_the_robust_rules_are_those_of_their_table():
    jobs = make_plan(load("robust_cifar10"), "small", Selection(), []).jobs.values()
    planned = {job.folder: {*job.overrides} for job in jobs}
    stored = {run.name: {*run.overrides} for run in stored_runs("robust").values()}
    assert stored == planned


def of_robust(rule, attack):
    """[method, seed] in percent, without the page's functions."""
    found = []
    for method in ("fedavg", "gc-fed"):
        names = [f"{method}-{rule}_{attack}_s{seed}" for seed in (1, 2)]
        runs = [stored_runs("robust")[name] for name in names]
        found.append([100 * run.metrics["test/acc"].dropna().iloc[-3:].mean() for run in runs])
    return np.array(found)


ATTACKS = ("none", "sign-flip", "noise", "label-flip", "alie", "ipm")
RULES = ("mean", "median", "trimmed-mean", "multi-krum", "geometric-median", "norm-clip")


def losses(rule, attack):
    """What an attack costs, means over the seeds, ``[method]``."""
    return (of_robust(rule, "none") - of_robust(rule, attack)).mean(axis=1)


def test_only_sign_flips_break_the_mean_and_ipm_costs_multi_krum_most():
    of_mean = {attack: losses("mean", attack).max() for attack in ATTACKS}
    assert {attack for attack, loss in of_mean.items() if loss > 11} == {"sign-flip"}
    assert losses("multi-krum", "sign-flip").max() < 0
    for rule in RULES[1:]:
        for attack in ("noise", "label-flip", "alie"):
            assert losses(rule, attack).max() <= 2.0 + 0.05
        if rule != "multi-krum":
            assert losses(rule, "ipm").max() < losses("multi-krum", "ipm").min()
            assert 3.55 <= losses(rule, "sign-flip").min() <= losses(rule, "sign-flip").max() < 6.35


def test_the_page_gives_what_centralization_changes():
    pairs = np.array(
        [[of_robust(rule, attack) for attack in ATTACKS] for rule in RULES]
    )  # [rule, attack, method, seed]
    gains = pairs[:, :, 1] - pairs[:, :, 0]
    text = page("robust.md").replace("−", "-")
    cells = gains.mean(axis=-1)
    assert f"between {cells.min():.1f} and {cells.max():+.1f} points" in text
    assert f"range from {gains.min():.1f} to {gains.max():+.1f}" in text
    alie = gains[:, ATTACKS.index("alie")]
    assert f"in all twelve pairs, by {alie.min():.1f} to {alie.max():.1f}" in text


FULFILLED_GAINS = {
    "FedLESAM, ρ 0.1": (0.5, -0.5),
    "FedLESAM constant, ρ 0.1": (-9.0, -9.0),
    "FedLESAM constant, ρ 0.01": (-0.9, 0.9),
    "FedLESAM constant, ρ 0.001": (0.1, 0.2),
    "FedWMSAM, ρ 0.01": (2.0, 2.0),
    "FedWMSAM constant, ρ 0.01": (1.0, 1.0),
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "hhhh"),
        ({"FedLESAM constant, ρ 0.01": (-1.1, 0.0)}, "fhhh"),
        ({"FedLESAM constant, ρ 0.1": (-9.0, -4.9)}, "hfhh"),
        ({"FedLESAM, ρ 0.1": (-0.1, 0.5)}, "hhfh"),
        ({"FedWMSAM constant, ρ 0.01": (1.0, 2.1)}, "hhhf"),
    ],
)
def test_each_prediction_about_directions_can_fail_alone(monkeypatch, changed, expected):
    gains = FULFILLED_GAINS | changed

    def gain(runs, label, column):
        return gains[label][column == "gc-fed"]

    monkeypatch.setattr(repeated, "direction_gain", gain)
    assert letters(repeated.direction_verdicts({})) == expected


def test_the_gains_of_the_directions_are_those_of_the_stored_runs():
    runs = stored_runs("constant-direction")
    words = {"algorithm=fedwmsam", "gc=gcfed"}
    fedavg = {"algorithm=fedavg", "gc=gcfed"}
    target = "methods.fedwmsam._target_=reproductions.constant_moves.ConstantWMSAM"
    gains = []
    for seed in ("seed=1", "seed=2", "seed=3"):
        (own,) = [run for run in runs.values() if {*words, target, seed} <= {*run.overrides}]
        (other,) = [run for run in runs.values() if {*fedavg, seed} <= {*run.overrides}]
        gains.append(tail(own) - tail(other))
    printed = table("constant-direction.md", 1)[-1][-1]
    assert numbers(printed)[0] == pytest.approx(np.mean(gains), abs=0.051)
