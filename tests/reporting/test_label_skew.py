"""The report states the label skew of a place as numbers."""

import pytest
from run_folders import write_run

from gcfed.reporting import write_report


@pytest.mark.parametrize("measured", [True, False])
def test_the_report_states_the_label_skew_of_its_runs(tmp_path, measured):
    for seed, hellinger in ((1, 0.5), (2, 0.7)):
        skew = {"partition/hellinger": hellinger, "partition/jensen_shannon": 0.4}
        summary = {"rounds": 1} | (skew if measured else {})
        write_run(tmp_path / f"{seed}", [{"test/acc": 0.5}], "gc=none", summary=summary, seed=seed)
    page = write_report(tmp_path, out=tmp_path / "report", figures=False).read_text()
    sentence = "Label skew, from 0 (equal clients) to 1: Hellinger 0.60, Jensen–Shannon 0.40."
    assert (sentence in page) == measured
