"""A method whose clients use their own models is judged by them, or is not compared."""

import pytest
from run_folders import GCFED, accuracies, run_of, write_run

from gcfed.reporting import write_report
from gcfed.reporting.build import MORE_MEASURES
from gcfed.reporting.frame import frame_of
from gcfed.reporting.tables import comparison, targets
from gcfed.reporting.verdict import judge

OWN = "personal/local_acc"
FEDREP = {"tags.algorithm": "fedrep", "methods.fedrep._target_": "gcfed.methods.x.FedRep"}
DITTO = {"tags.algorithm": "ditto", "methods.ditto._target_": "gcfed.methods.x.Ditto"}


def runs(accs, own=None, result="test/acc", **config):
    """One run for each test accuracy, with the accuracy of the clients' own models if given."""
    found = []
    for seed, acc in enumerate(accs, start=1):
        run = run_of(seed=seed, values=(acc,), summary={"result": result}, **config)
        if own is not None:
            run.metrics[OWN] = own[seed - 1]
        found.append(run)
    return found


def of(*parts):
    rows = frame_of([run for part in parts for run in part])
    return rows, judge(rows)


FEDAVG = (0.90, 0.91, 0.92)
LOST = (0.10, 0.12, 0.08)  # a model that no client uses
LOCAL = (0.80, 0.81, 0.82)
BETTER = (0.88, 0.90, 0.89)


def test_all_are_judged_by_the_declared_result_if_all_have_it():
    rows, found = of(runs(FEDAVG, LOCAL), runs(LOST, BETTER, OWN, **FEDREP))
    assert found.measure == f"final:{OWN}"
    assert found.headline == "fedrep leads, +8.0 points over fedavg (5.5 to 10.5)"
    table = comparison(found, rows, MORE_MEASURES, "c", "P")
    assert table.title == "Accuracy of clients' own models (%), higher is better: P"
    assert table.frame.iloc[:, 1].tolist() == ["89.00 ± 1.00", "81.00 ± 1.00"]
    assert r"89.00 $\pm$ 1.00" in table.latex
    models = "the models that clients of fedrep use"
    assert f"Test accuracies are the global model's, not those of {models}." in table.notes


def test_otherwise_only_what_can_be_compared_is_ranked_and_the_reason_is_given():
    better = (0.93, 0.94, 0.95)
    rows, found = of(runs(FEDAVG), runs(better, **GCFED), runs(LOST, BETTER, OWN, **FEDREP))
    assert found.measure == "final:test/acc"
    assert found.ranked == ["gcfed", "fedavg"]
    assert found.headline.startswith("gcfed leads, +3.0 points over fedavg")
    assert found.headline.endswith("; fedrep is not compared")
    why = (
        "fedrep is judged by personal/local_acc, which fedavg and gcfed did not measure"
        " (metrics=personal data.client_test=0.2 measures it)"
    )
    assert found.not_compared == {"fedrep": why}
    table = comparison(found, rows, MORE_MEASURES, "c", "P")
    assert f"Not compared: {why}." in table.notes
    assert table.frame.set_index("method").iloc[:, 0]["fedrep"] == "not compared"
    assert "10.00" not in table.latex


def test_personal_methods_are_compared_with_each_other():
    worse = (0.70, 0.71, 0.72)
    methods = (runs(LOST, BETTER, OWN, **FEDREP), runs(LOST, worse, OWN, **DITTO))
    _, found = of(runs(FEDAVG), *methods)
    assert found.measure == f"final:{OWN}"
    assert found.ranked == ["fedrep", "ditto"]
    assert found.not_compared["fedavg"].startswith(
        f"fedavg did not measure {OWN}, the result of the"
    )


def test_a_personal_method_that_did_not_measure_its_result_has_none():
    _, found = of(runs(LOST, None, OWN, **FEDREP))
    assert found.headline.startswith(f"fedrep did not measure {OWN}, its result (metrics=personal")
    _, found = of(runs(FEDAVG), runs(LOST, None, OWN, **FEDREP))
    assert found.headline.startswith(f"Not ranked: fedrep did not measure {OWN}")
    assert found.table["n"].to_dict() == {"fedavg": 3, "fedrep": 0}


def test_targets_are_the_global_models():
    low = {"targets": [0.05]}
    rows, found = of(runs(FEDAVG, LOCAL, **low), runs(LOST, BETTER, OWN, **FEDREP, **low))
    assert targets(found, rows, "t", "T").frame["method"].tolist() == ["fedavg"]


@pytest.mark.parametrize(("every", "number"), [(1, "53.55"), (10, "54.00")])
def test_long_runs_are_judged_by_their_last_ten_rounds(tmp_path, every, number):
    """A measurement every ten rounds has one value in the last ten."""
    for seed in (1, 2, 3):
        for result, own in ((OWN, 0.5), ("test/acc", 0.4)):
            local = [own + 0.001 * t if t % every == 0 else None for t in range(1, 41)]
            rows = accuracies(*[0.9] * 40, **{OWN: local})
            name = {"tags": {"algorithm": result[:4]}, "methods": {"m": {"_target_": result[:4]}}}
            folder = tmp_path / f"{result[:4]}{seed}"
            write_run(folder, rows, summary={"rounds": 40, "result": result}, seed=seed, **name)
    page = write_report(tmp_path, out=tmp_path / "out", figures=False).read_text()
    assert f"<td>{number} ± 0.00</td>" in page
    assert "Accuracy of clients&#39; own models, last 10 rounds (%)" in page
