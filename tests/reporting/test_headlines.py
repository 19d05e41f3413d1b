"""Every headline holds when it is computed again from metrics.csv, by the measure that it names.

The runs are random, and the computation shares no code with the report.
"""

import csv
import html
import json
import re
from itertools import combinations

import numpy as np
import pytest
from run_folders import write_run
from scipy import stats

from gcfed.reporting import write_report

METHODS = ("FedAvg", "GC-Fed", "SCAFFOLD", "FedRep", "Ditto")
TITLES = {
    "Test accuracy": "test/acc",
    "Accuracy of clients' own models": "personal/local_acc",
    "RMSE": "test/rmse",
}
GAP = re.compile(
    r"([\w-]+) ([+−][\d,.]+)(?: (.+?) (?:over|against) ([\w-]+))?"
    r"(?: \((.+?) to (.+?)\))?(, uncertain)?"
)


def write_random_runs(root, rng):
    """Some methods with random seeds, ends and columns in one place."""
    rounds = int(rng.choice([3, 30, 35]))
    is_regression = rng.random() < 0.2
    spread = rng.choice([0.002, 0.03])
    everybody_measures = rng.random() < 0.5
    for method in METHODS[: rng.integers(1, 6)]:
        is_personal = method in METHODS[3:] and not is_regression
        measures_own = not is_regression and (everybody_measures or rng.random() < 0.5)
        level = rng.uniform(0.3, 0.7)
        for seed in range(1, 1 + rng.integers(1, 6)):
            if rng.random() < 0.1:
                continue
            rows = []
            for t in range(1, rounds + 1):
                row = {"test/loss": float(rng.uniform(1, 2))}
                if t == rounds or rng.random() < 0.7:
                    number = float(level + spread * rng.normal())
                    row["test/rmse" if is_regression else "test/acc"] = number
                if measures_own and (t == rounds or t % 10 == 0):
                    own = float(0.8 - level / 3 + spread * rng.normal())
                    row["personal/local_acc"] = own
                rows.append(row)
            ended = rng.random() < 0.9
            summary = {"rounds": rounds, "ended": f"2026-01-0{seed}"}
            summary["result"] = "personal/local_acc" if is_personal else "test/acc"
            write_run(
                root / f"{method}_{seed}",
                rows,
                ended=ended,
                summary=summary,
                seed=seed,
                rounds=rounds,
                tags={"algorithm": method},
                methods={} if method == "FedAvg" else {"m": {"_target_": f"mine.{method}"}},
            )


def read_runs(root):
    """{method: {seed: (declared result, {column: [(round, value)]})}} of the runs that ended."""
    found = {}
    for folder in sorted(root.iterdir()):
        if not (folder / "summary.json").is_file():
            continue
        method, seed = folder.name.rsplit("_", 1)
        curves = {}
        for row in csv.DictReader((folder / "metrics.csv").open()):
            for name, text in row.items():
                if text:
                    curves.setdefault(name, []).append((int(row["round"]), float(text)))
        result = json.loads((folder / "summary.json").read_text())["result"]
        found.setdefault(method, {})[int(seed)] = (result, curves)
    return found


def measure(curves, column, last_ten):
    rounds = curves["round"][-1][0]
    values = [value for t, value in curves.get(column, ()) if t > rounds - 10]
    if not last_ten:
        values = [value for _, value in curves.get(column, ())][-1:]
    return float(np.mean(values)) if values else None


def number(text):
    return float(text.replace("−", "-").replace(",", ""))


@pytest.mark.parametrize("case", range(40))
def test_a_headline_holds_when_computed_again(tmp_path, case):
    rng = np.random.default_rng(case)
    logs = tmp_path / "logs"
    logs.mkdir()
    while not any(logs.iterdir()):
        write_random_runs(logs, rng)
    page = write_report(logs, out=tmp_path / "out", figures=False).read_text()
    (answer,) = re.findall('<p class="answer">(.*?)</p>', page)
    headline = html.unescape(answer)
    named = html.unescape(re.search(r'<p class="note">(.*? is better)\.', page)[1])
    column = TITLES[re.match(r"[^,(]+", named)[0].strip()]
    is_lower = named.endswith("lower is better")
    runs = read_runs(logs)
    values = judged_by(column, runs, ", last 10 rounds" in named)
    if headline.startswith("Not ranked"):
        for one, other in combinations(values, 2):
            assert len(values[one].keys() & values[other].keys()) < 3
    elif "lead" in headline:
        check_ranking(headline, values, is_lower)
    elif headline.endswith(": no result yet"):
        assert not values
    elif "did not measure" in headline:
        assert not values
        assert len(runs) == 1
    else:
        ((method, numbers),) = values.items()
        assert headline.startswith(f"{method}: ")
        shown = number(re.search(r"([\d.]+)(?: %|, lower is better)?$", headline)[1])
        mean = np.mean([*numbers.values()]) * (1 if is_lower else 100)
        assert shown == pytest.approx(mean, abs=0.006)


def judged_by(column, runs, last_ten):
    """{method: {seed: value}} of the methods that declare no other column as their result."""
    values = {}
    for method, seeds in runs.items():
        (declared,) = {result for result, _ in seeds.values()}
        if declared not in (column, "test/acc"):
            continue
        numbers = {seed: measure(curves, column, last_ten) for seed, (_, curves) in seeds.items()}
        numbers = {seed: value for seed, value in numbers.items() if value is not None}
        if numbers:
            values[method] = numbers
    return values


def sharing_seeds(values):
    """The methods that share three seeds, those with the most seeds first, and their values."""
    ranked = []
    seeds = None
    for method in sorted(values, key=lambda one: -len(values[one])):
        common = {*values[method]} if seeds is None else seeds & {*values[method]}
        if len(common) >= 3:
            ranked.append(method)
            seeds = common
    return {method: np.array([values[method][seed] for seed in sorted(seeds)]) for method in ranked}


def interval(differences):
    mean = differences.mean()
    error = stats.sem(differences)
    return stats.t.interval(0.95, len(differences) - 1, loc=mean, scale=error)


def check_ranking(headline, values, is_lower):
    """Checks a headline about methods that share at least three seeds."""
    first, *others = headline.removesuffix(", lower is better").split("; ")
    if others and others[-1].endswith(" not compared"):
        apart = re.sub(r" (is|are) not compared", "", others.pop())
        assert not {*re.split(r", | and ", apart)} & {*values}
    table = sharing_seeds(values)
    sign = -1 if is_lower else 1
    best = max(table, key=lambda one: sign * table[one].mean())
    leaders = {best}
    for one in table:
        gains = [sign * (table[one] - table[other]) for other in table if other != one]
        if all(interval(gain)[1] >= 0 for gain in gains):
            leaders.add(one)
    if first == "No method leads clearly":
        assert leaders == {*table}
    elif found := re.fullmatch(r"(\d) of (\d) methods lead, ([\w-]+) first", first):
        assert found.groups() == (str(len(leaders)), str(len(table)), best)
    else:
        names = re.match(r"(.*?) leads?\b", first)[1]
        assert {*re.split(r", | and ", names)} == leaders
    # the only leader and its difference stand in one phrase
    phrase = others[0] if others else first.replace(" leads,", "")
    gaps = GAP.findall(phrase)
    reference = gaps[0][3]
    assert reference == ("FedAvg" if "FedAvg" in table else best)
    for method, gap, _, _, low, high, unsure in gaps:
        difference = table[method] - table[reference]
        ends = interval(difference)
        factor, tolerance = (1, 6e-4) if is_lower else (100, 0.051)
        assert number(gap) == pytest.approx(factor * difference.mean(), abs=tolerance)
        assert bool(unsure) == (ends[0] <= 0 <= ends[1])
        if low:
            shown = [number(low), number(high)]
            assert shown == pytest.approx([factor * end for end in ends], abs=tolerance)
