"""The p values of the index of results, and Welch's tests of Table 8, follow from the pages."""

import itertools
import re

import numpy as np
import pytest
from scipy import stats

from gcfed.tables.ranking import Sample, compare_means
from gcfed.utils.resolvers import ROOT
from reproductions.results import repeated
from reproductions.results.figures import numbers, table
from reproductions.stored import stored_runs

INDEX = (ROOT / "reproductions/results/README.md").read_text()
FAMILY = INDEX.partition("## Which answers stand")[2]


def of_means(gains):
    """p of "the mean is 0", by Student's t over the seeds."""
    return stats.ttest_1samp(gains, 0).pvalue


def of_signs(gains):
    """p of the exact two-sided sign-flip test."""
    gains = np.array(gains)
    flips = np.array([*itertools.product((1, -1), repeat=len(gains))])
    return np.mean(abs(flips @ gains) >= abs(gains.sum()) - 1e-9)


def row(page, number, name):
    (found,) = [cells for cells in table(page, number) if cells[0] == name]
    return found[1:]


def signed(cells):
    return [float(cell.replace("−", "-")) for cell in cells]


def table5(name, last, number=7):
    """A row of gains of Table 5's clipped runs, over the last 10 or 50 rounds, by seed."""
    cells = row("gcfed-table5.md", number, name)
    return signed(cells[(0 if last == 10 else 1) : 6 : 2])


def table5_unclipped(column):
    def of(method):
        names = [f"{method}, seed {seed}" for seed in (1, 2, 3)]
        return np.array([float(row("gcfed-table5.md", 2, name)[column]) for name in names])

    return of("GC-Fed") - of("FedAvg")


def table8(number):
    """Gains by seed; table 4 is that of 200 rounds and α 0.1, table 5 of α 1.0."""
    return signed(row("gcfed-table8.md", number, "GC-Fed above FedAvg")[:3])


def table8_of_100_rounds(name):
    cells = row("gcfed-table8.md", 6, name)[:4]
    return np.array([numbers(cell)[0] for cell in cells if cell])


def feddpc(name):
    return np.array(repeated.last_ten(repeated.finals(stored_runs("feddpc"), name)))


def equal_rate():
    first, second = (
        [float(x) for x in row("equal-rate.md", 0, n)[:10]] for n in ("FedAvg", "GC-Fed")
    )
    return np.subtract(second, first)


def today():
    gains = [np.subtract(numbers(g), numbers(p)) for _, p, g, _ in table("today.md", 0)]
    assert len(gains) == 40
    return np.array(gains)


def tuned_tasks(number):
    pairs = [(numbers(p), numbers(g)) for _, p, g, _ in table("tuned-tasks.md", number)]
    return np.mean([np.subtract(g, p) for p, g in pairs], axis=0)


def third_search():
    return signed([cells[3] for cells in table("tuned.md", 0)])


def first_search(kind):
    return signed(row("tuned.md", 2, kind)[:6])


def late_updates(letter):
    """The numbers of the three seeds in a planned comparison of late updates."""
    return signed(row("late-updates.md", 2, letter)[1].split(", "))


LATE = {
    "GC-Fed − none, three late methods, equal uploads": "A",
    "GC-Fed − none, two synchronous methods, equal uploads": "B",
    "GC-Fed's gain, late − synchronous methods, equal uploads": "C",
    "GC-Fed's gain with late methods, σ 1.4 − σ 0.7": "D",
    "GC-Fed's gain, FedAsync − FedBuff": "E",
    "GC-Fed − none, late and synchronous methods, equal time": "F",
}
DPC = "FedDPC with Global GC"
COMPUTED = {
    "GC-Fed − FedAvg at equal rate": lambda: of_means(equal_rate()),
    "GC-Fed − none, mean of 40 methods at best of three rates": lambda: of_means(
        today().mean(axis=0)
    ),
    "GC-Fed − FedAvg, Table 8, 100 rounds, α 0.1": lambda: of_means(
        table8_of_100_rounds("α 0.1, GC-Fed") - table8_of_100_rounds("α 0.1, FedAvg")
    ),
    "GC-Fed − FedAvg, Table 8, 100 rounds, α 1.0": lambda: of_means(
        table8_of_100_rounds("α 1.0, GC-Fed") - table8_of_100_rounds("α 1.0, FedAvg")
    ),
    "GC-Fed − FedAvg, Table 8, 200 rounds, α 0.1": lambda: of_means(table8(4)),
    "GC-Fed − FedAvg, Table 8, 200 rounds, α 1.0": lambda: of_means(table8(5)),
    "GC-Fed − FedAvg, Table 5, last 10 of 800 rounds": lambda: of_means(table5_unclipped(0)),
    "GC-Fed − FedAvg, Table 5, last 50 of 800 rounds": lambda: of_means(table5_unclipped(3)),
    "GC-Fed − none, Fashion-MNIST, mean of four methods": lambda: of_means(tuned_tasks(2)),
    "none − GC-Fed, text, mean of four methods": lambda: of_means(tuned_tasks(1)),
    "GC-Fed − none, third equal search, sign flips": lambda: of_signs(third_search()),
    "Global GC − none, first equal search, sign flips": lambda: of_signs(first_search("Global GC")),
    "Local GC − none, first equal search, sign flips": lambda: of_signs(first_search("Local GC")),
    "GC-Fed − none, first equal search, sign flips": lambda: of_signs(first_search("GC-Fed")),
    "GC-Fed − none, second equal search, sign flips": lambda: of_signs(
        signed(row("tuned.md", 4, "difference"))
    ),
    "FedDPC − FedAvg": lambda: of_means(feddpc("FedDPC") - feddpc("FedAvg")),
    f"{DPC} − FedAvg": lambda: of_means(feddpc(DPC) - feddpc("FedAvg")),
    f"{DPC} − Global GC": lambda: of_means(feddpc(DPC) - feddpc("FedAvg with Global GC")),
    "Global GC − FedDPC": lambda: of_means(feddpc("FedAvg with Global GC") - feddpc("FedDPC")),
    "Global GC − FedAvg, on the page of FedDPC": lambda: of_means(
        feddpc("FedAvg with Global GC") - feddpc("FedAvg")
    ),
    "GC-Fed − FedAvg, on the page of FedDPC": lambda: of_means(
        feddpc("FedAvg with GC-Fed") - feddpc("FedAvg")
    ),
}
for rounds in (10, 50):
    end = f"last {rounds} of 800 rounds"
    for text, name in (
        ("GC-Fed − Global GC, both clipped", "GC-Fed above Global GC, both clipped"),
        ("GC-Fed − FedAvg, both clipped", "GC-Fed's gain, both clipped"),
        ("clipped − unclipped GC-Fed", "clipping adds"),
    ):
        COMPUTED[f"{text}, {end}"] = lambda name=name, rounds=rounds: of_means(table5(name, rounds))
for text, letter in LATE.items():
    COMPUTED[text] = lambda letter=letter: of_means(late_updates(letter))


def family():
    """{comparison: (p, it was planned, it is bold)} of the index."""
    found = {}
    for name, p, kind in re.findall(
        r"^\| (.*?) \| ([\d.]+) \| (planned)? ?\|$", FAMILY, re.MULTILINE
    ):
        found[name.strip("*")] = (p, bool(kind), name.startswith("**"))
    return found


def test_the_family_is_complete_and_ordered():
    assert {*family()} == {*COMPUTED}
    values = [float(p) for p, *_ in family().values()]
    assert values == sorted(values)
    assert f"The {len(values)} comparisons" in FAMILY


@pytest.mark.parametrize("name", COMPUTED)
def test_a_p_follows_from_its_page(name):
    """The pages print rounded numbers, so that the last digit may differ by one or two."""
    printed = family()[name][0]
    assert COMPUTED[name]() == pytest.approx(float(printed), rel=0.06)


def test_the_index_gives_the_p_of_late_updates_by_the_rule_of_their_plan():
    (sentence,) = re.findall(r"By the plan's time rule .*", FAMILY)
    found = {name: cells for name, *cells in table("late-updates.md", 3)}
    expected = [found[letter][4] for letter in "ACEF"]
    assert re.findall(r"0\.\d\d", sentence) == expected


def test_holms_correction_leaves_the_bold_answers_and_five_stand_alone():
    rows = [*family().values()]
    left = []
    for number, (p, _, bold) in enumerate(rows):
        if float(p) > 0.05 / (len(rows) - number):
            break
        left.append(bold)
    assert left == [bold for *_, bold in rows if bold] == [True]
    alone = [p for p, planned, _ in rows if planned and float(p) < 0.05]
    assert len(alone) == 5


def test_no_single_method_of_forty_stands_after_holms_correction():
    ps = np.sort([of_means(gains) for gains in today()])
    assert ps[0] > 0.05 / 40
    assert round(ps[0], 4) == 0.0013


def test_cells_at_an_end_of_their_grid_are_counted():
    text = (ROOT / "reproductions/results/today.md").read_text()
    lowest = highest = 0
    for name, *cells in table("today.md", 0):
        grid = ("0.0003", "0.003") if name == "FedAdamW" else ("0.01", "0.1")
        rates = [re.search(r"\(([\d.]+)\)", cell)[1] for cell in cells[:2]]
        lowest += rates.count(grid[0])
        highest += rates.count(grid[1])
    assert f"**{lowest + highest} of the 80 cells" in text
    assert f"{lowest} the lowest of three rates and {highest} the highest" in text


PAPER = {
    "α 0.1, GC-Fed": Sample(61.50, 1.29, 3),
    "α 0.1, FedAvg": Sample(52.22, 0.90, 3),
    "α 1.0, GC-Fed": Sample(70.51, 0.11, 3),
    "α 1.0, FedAvg": Sample(62.50, 1.24, 3),
}
OURS = {"GC-Fed": "GC-Fed, [C_out, 1, 1, 1]", "FedAvg": "FedAvg"}


@pytest.mark.parametrize("name", PAPER)
def test_welchs_tests_of_table_8_follow_from_its_tables(name):
    cells = row("gcfed-table8.md", 3, name)
    alpha, _, method = name.partition(", ")
    runs = signed(row("gcfed-table8.md", 4 if alpha == "α 0.1" else 5, OURS[method])[:3])
    for values, printed in ((runs, cells[:3]), (table8_of_100_rounds(name), cells[3:])):
        ours = Sample(np.mean(values), np.std(values, ddof=1), len(values))
        found = compare_means(ours, PAPER[name])
        difference, error, p = signed([cell.lstrip("+") for cell in printed])
        assert found.value == pytest.approx(difference, abs=0.06)
        of_means = [one.std / one.seeds**0.5 for one in (ours, PAPER[name])]
        assert np.hypot(*of_means) == pytest.approx(error, abs=0.06)
        assert found.p == pytest.approx(p, rel=0.12)


def test_readme_gives_both_measures_of_table_5_in_one_line():
    (line,) = re.findall(r"^GC-Fed gains .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    stated = [float(x.replace("−", "-")) for x in re.findall(r"−?\d+\.\d", line)]
    expected = []
    for column in (0, 3):
        gains = table5_unclipped(column)
        half = stats.t.ppf(0.975, 2) * stats.sem(gains)
        expected += [gains.mean(), gains.mean() - half, gains.mean() + half]
    assert stated == pytest.approx(expected, abs=0.051)


def test_the_accuracies_of_vgg11_are_those_of_the_table_on_its_page():
    name = "tinyimagenet-vgg11.md"
    page = (ROOT / "reproductions/results" / name).read_text()
    readme = (ROOT / "README.md").read_text()
    gcfed, fedavg = (row(name, 0, method)[4] for method in ("GC-Fed", "FedAvg"))
    assert f"{gcfed} % after 50 rounds with GC-Fed and {fedavg} % with FedAvg" in readme
    assert f"after 50 rounds GC-Fed has {gcfed} %, FedAvg {fedavg} %" in INDEX
    assert f"after 50 rounds with one seed, GC-Fed has {gcfed} % and FedAvg {fedavg} %" in page
    assert f"by {float(gcfed) - float(fedavg):.1f} points" in page


def test_readmes_table_of_digits_follows_from_the_page():
    """Mean ± sample standard deviation, each to one decimal."""
    seeds = {name: cells for name, *cells in table("every-method.md", 1)}
    found = re.findall(
        r"^\| (\w+) \| ([\d.±]+) \| ([\d.±]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(found) == 9
    for name, *cells in found:
        for cell, own in zip(cells, seeds[name], strict=True):
            values = numbers(own)
            mean, std = (float(x) for x in cell.split("±"))
            assert mean == pytest.approx(np.mean(values), abs=0.051)
            assert std == pytest.approx(np.std(values, ddof=1), abs=0.051)
