"""The cells of the tables of small runs that were repeated and stored: ``figures.md``, ``ssf.md``,
``robust.md``, ``feddpc.md``, ``gc-warmup.md`` and ``constant-direction.md``.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

from reproductions.results.cells import (
    Cells,
    Runs,
    Verdict,
    interval_text,
    last,
    last_tests,
    listed,
    number,
    rows_of,
    signed,
)
from reproductions.stored import StoredRun, chosen, rate_of, seed_of

MEASURED = 10  # the last rounds, whose tests are averaged


def last_ten(runs: Sequence[StoredRun]) -> list[float]:
    """The mean of each run's tests in its last ten rounds, in percent."""
    return [last(run, MEASURED) for run in runs]


# ------------------------------------------------------------------------------------- figures.md
FIG1B = "metrics=gap"
PARTICIPANTS = (5, 10, 20, 50)
FIG2 = "metrics=[drift,cka]"
#: The label of a stored run.
DIVERGING = {
    "fedavgm_alpha-0.3_s1": "FedAvgM, server momentum 0.4",
    "fedavgm_alpha-0.3_s1,server.momentum=0.9": "FedAvgM, server momentum 0.9",
    "fedacg_alpha-0.3_s1": "FedACG",
    "fedcm_alpha-0.3_s1": "FedCM",
}
STAGES = ("cka/fc1", "cka/fc2", "cka/fc3")
FIG5 = "metrics=leakage"
RATES = ("0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1")


def distances(runs: Runs) -> Cells:
    """GC-Fed's Figure 1b: the L2 distance between a cohort's update and that of all clients, mean
    over the rounds and the seeds.
    """
    cells: Cells = {}
    for label, partition in (
        ("Dirichlet 0.1", "partition.alpha=0.1"),
        ("i.i.d.", "partition=iid"),
    ):
        row: list[str | None] = []
        for count in PARTICIPANTS:
            own = chosen(runs, FIG1B, partition, f"participation.per_round={count}")
            row.append(number(fmean(run.curve("gap/l2").mean() for run in own), 3))
        cells[label,] = row
    return cells


def divergence(runs: Runs) -> Cells:
    """FedACG's Figure 2: the divergence of the clients, and the CKA of the stage with the least,
    means over the rounds.
    """
    cells: Cells = {}
    for run in chosen(runs, FIG2):
        least = min(run.curve(stage).mean() for stage in STAGES)
        mean = run.curve("drift/divergence").mean()
        cells[DIVERGING[run.name],] = [number(mean, 3), number(least, 3)]
    return cells


def leakage(runs: Runs) -> Cells:
    """FedGC's Figure 5: how near the recovered image is to the client's, in dB."""
    cells: Cells = {}
    for label, algorithm in (("FedAvg", "algorithm=fedavg"), ("FedGC", "algorithm=fedgc")):
        (run,) = chosen(runs, FIG5, algorithm)
        cells[label,] = [number(value, 1) for value in run.curve("leakage/psnr")]
    return cells


def rates(runs: Runs) -> Cells:
    """SSF's rates of SCAFFOLD: the relative error after the last round, in 10⁻³."""
    cells: Cells = {}
    for label, heterogeneity in (("0.1", "low"), ("0.5", "medium")):
        row: list[str | None] = []
        for rate in RATES:
            words = (f"heterogeneity={heterogeneity}", f"client.optimizer.lr={rate}")
            row.append(errors(chosen(runs, "experiment=matrix_regression_ssf", *words)))
        cells[label,] = row
    return cells


def errors(own: Sequence[StoredRun]) -> str:
    """The last relative error in 10⁻³: the mean, and in brackets the standard deviation of several
    seeds.
    """
    ends = [1000 * run.metrics["test/relative_error"].iloc[-1] for run in own]
    if not max(ends) < 1000:
        return "diverged"
    mean = significant(fmean(ends), 3)
    return f"{mean} ({significant(stdev(ends), 2)})" if len(ends) > 1 else mean


def significant(value: float, digits: int) -> str:
    # "#" keeps zeros at the end, and a point behind whole numbers
    return f"{value:#.{digits}g}".rstrip(".")


# ----------------------------------------------------------------------------------------- ssf.md
LEVELS = {"0.1": "low", "0.5": "medium", "2.0": "high"}  # ν → heterogeneity
RATIOS = ("0.01", "0.05", "0.1", "0.2", "0.5")  # r/d
#: The key of a method's r/d, and its other overrides.
SUBSPACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "SSF": ("methods.ssf.ratio", ()),
    "FedSub, refresh 1": ("methods.fedsub.ratio", ("methods.fedsub.refresh=1",)),
    "FedSub, refresh 5": ("methods.fedsub.ratio", ("methods.fedsub.refresh=5",)),
}


def whole_space(runs: Runs) -> Cells:
    """The errors of the methods without a subspace, by ν."""
    cells: Cells = {}
    for nu, level in LEVELS.items():
        words = [f"algorithm={name}" for name in ("scaffold", "fedavg")]
        cells[nu,] = [None, None, None, *(errors_of(runs, level, word) for word in words)]
    return cells


def subspaces(runs: Runs) -> Cells:
    """The errors by ν, method and r/d."""
    cells: Cells = {}
    for nu, level in LEVELS.items():
        for method, (key, words) in SUBSPACES.items():
            row = [errors_of(runs, level, f"{key}={ratio}", *words) for ratio in RATIOS]
            cells[nu, method] = row
    return cells


def errors_of(runs: Runs, level: str, *words: str) -> str | None:
    """None if no such run is stored."""
    wanted = {f"heterogeneity={level}", *words}
    own = [run for run in runs.values() if wanted <= {*run.overrides}]
    return errors(own) if own else None


# -------------------------------------------------------------------------------------- robust.md
ROBUST_TESTS = 3  # an accuracy is the mean of so many tests
ATTACKS = ("none", "sign-flip", "noise", "label-flip", "alie", "ipm")
#: The label of a rule → its part of a run's name.
RULES = {
    "mean": "mean",
    "median": "median",
    "trimmed mean": "trimmed-mean",
    "multi-Krum": "multi-krum",
    "geometric median": "geometric-median",
    "norm clip, 1": "norm-clip",
}


def robust(runs: Runs) -> Cells:
    """FedAvg / GC-Fed by rule and attack, means over two seeds."""
    cells: Cells = {}
    for label, rule in RULES.items():
        row: list[str | None] = []
        for attack in ATTACKS:
            pair = []
            for method in ("fedavg", "gc-fed"):
                seeds = [runs[f"{method}-{rule}_{attack}_s{seed}"] for seed in (1, 2)]
                pair.append(fmean(last_tests(run, ROBUST_TESTS) for run in seeds))
            row.append(f"{number(pair[0], 1)} / {number(pair[1], 1)}")
        cells[label,] = row
    return cells


# -------------------------------------------------------------------------------------- feddpc.md
SEARCH_SEED = 100
TRIED = ("0.01", "0.03", "0.1")
FEDDPC = {
    "FedAvg": ("algorithm=fedavg", "gc=none"),
    "FedDPC": ("algorithm=feddpc", "gc=none"),
    "FedAvg with Global GC": ("algorithm=fedavg", "gc=global"),
    "FedDPC with Global GC": ("algorithm=feddpc", "gc=global"),
    "FedAvg with GC-Fed": ("algorithm=fedavg", "gc=gcfed"),
}


def feddpc(runs: Runs) -> Cells:
    """The seeds with the rate, their mean, and the mean difference to FedAvg with its interval."""
    fedavg = last_ten(finals(runs, "FedAvg"))
    cells: Cells = {}
    for label in FEDDPC:
        own = finals(runs, label)
        values = last_ten(own)
        above = [a - b for a, b in zip(values, fedavg, strict=True)]
        gain = None
        if label != "FedAvg":
            gain = f"{signed(fmean(above), 1)} ({interval_text(above)})"
        seeds = f"{listed(values)} ({rate_of(own[0])})"
        cells[label,] = [seeds, number(fmean(values), 1), gain]
    return cells


def finals(runs: Runs, label: str) -> list[StoredRun]:
    """The runs of a method with its best rate, by seed."""
    return [run for run in chosen(runs, *FEDDPC[label]) if seed_of(run) != SEARCH_SEED]


def feddpc_search(runs: Runs) -> Cells:
    """The accuracy of each trial on the held-out images, in percent."""
    cells: Cells = {}
    for label, words in FEDDPC.items():
        row: list[str | None] = []
        for rate in TRIED:
            trial = (f"client.optimizer.lr={rate}", f"seed={SEARCH_SEED}")
            (run,) = chosen(runs, *words, *trial)
            row.append(number(last(run, MEASURED, "val/acc"), 1))
        cells[label,] = row
    return cells


# ------------------------------------------------------------------------- constant-direction.md
DIRECTIONS = {
    "FedAvg": "fedavg",
    "FedSAM, ρ 0.1": "fedsam-rho-0.1",
    "FedLESAM, ρ 0.1": "fedlesam-rho-0.1",
    "FedLESAM constant, ρ 0.1": "fedlesam-constant-rho-0.1",
    "FedLESAM constant, ρ 0.01": "fedlesam-constant-rho-0.01",
    "FedLESAM constant, ρ 0.001": "fedlesam-constant-rho-0.001",
    "FedWMSAM, ρ 0.01": "fedwmsam-rho-0.01",
    "FedWMSAM constant, ρ 0.01": "fedwmsam-constant-rho-0.01",
}
WITH_AND_WITHOUT_GC = ("no-gc", "gc-fed")


def of_direction(runs: Runs, label: str, column: str) -> list[float]:
    """The last ten rounds of the seeds 1, 2 and 3, in percent."""
    row = DIRECTIONS[label]
    return last_ten([runs[f"{row}_{column}_s{seed}"] for seed in (1, 2, 3)])


def direction_gain(runs: Runs, label: str, column: str) -> float:
    """The mean difference to FedAvg in the same column."""
    values = of_direction(runs, label, column)
    fedavg = of_direction(runs, "FedAvg", column)
    return fmean(value - other for value, other in zip(values, fedavg, strict=True))


def directions(runs: Runs) -> Cells:
    """Each row's seeds and mean difference to FedAvg, without GC and with GC-Fed."""
    cells: Cells = {}
    for label in DIRECTIONS:
        row: list[str | None] = []
        for column in WITH_AND_WITHOUT_GC:
            row.append(listed(of_direction(runs, label, column)))
            is_reference = label == "FedAvg"
            row.append(None if is_reference else signed(direction_gain(runs, label, column), 1))
        cells[label,] = row
    return cells


def direction_verdicts(runs: Runs) -> dict[str, Verdict]:
    """The four predictions of the repetition."""

    def gains(label: str) -> list[float]:
        return [direction_gain(runs, label, column) for column in WITH_AND_WITHOUT_GC]

    small = [*gains("FedLESAM constant, ρ 0.001"), *gains("FedLESAM constant, ρ 0.01")]
    large = gains("FedLESAM constant, ρ 0.1")
    papers = [gains("FedLESAM, ρ 0.1")[0], gains("FedWMSAM, ρ 0.01")[0]]
    constant = gains("FedWMSAM constant, ρ 0.01")
    lost = [a - b for a, b in zip(constant, gains("FedWMSAM, ρ 0.01"), strict=True)]
    return {
        "1": Verdict(_signed_list(small), max(map(abs, small)) <= 1),
        "2": Verdict(_signed_list(large), max(large) < -5),
        "3": Verdict(_signed_list(papers), min(papers) > 0),
        "4": Verdict(_signed_list(lost), max(lost) < 0),
    }


def direction_predictions(runs: Runs) -> Cells:
    return rows_of(direction_verdicts(runs), given=0)


def _signed_list(values: Sequence[float]) -> str:
    return ", ".join(signed(value, 1) for value in values)


# ----------------------------------------------------------------------------------- gc-warmup.md
LAMBDAS = {
    "λ 0 (Global GC)": "gc.lam=0.0",
    "λ 0.25": "gc.lam=0.25",
    "λ 0.5": "gc.lam=0.5",
    "λ 1 (Local GC)": "gc.lam=1.0",
    "`gc=warmup`": "gc=warmup",
}


def warmup_digits(runs: Runs) -> Cells:
    """The first column of three: the digits."""
    own = {label: chosen(runs, DIGITS, word) for label, word in LAMBDAS.items()}
    return {(label,): [mean_and_seeds(of_label), None, None] for label, of_label in own.items()}


def warmup_mnist(runs: Runs) -> Cells:
    """The first column of two: MNIST, without λ 0.25."""
    cells: Cells = {}
    for label, word in LAMBDAS.items():
        if label != "λ 0.25":
            cells[label,] = [mean_and_seeds(chosen(runs, MNIST, word)), None]
    return cells


DIGITS = "experiment=digits_mlp_gcfed"
MNIST = "data=mnist"


def mean_and_seeds(own: Sequence[StoredRun]) -> str:
    values = last_ten(own)
    return f"{number(fmean(values))}: {listed(values)}"
