"""The report states the distances of a place's clients as numbers."""

import pytest
from run_folders import write_run

from gcfed.reporting import write_report

LABELS = {"partition/hellinger": 0.5, "partition/jensen_shannon": 0.4}
FEATURES = {"partition/feature_distance": 0.3}
LABEL_SENTENCE = "Label skew, from 0 (equal clients) to 1: Hellinger 0.60, Jensen–Shannon 0.40."
FEATURE_SENTENCE = "Feature skew, 0 for clients with equal means: 0.40 standard deviations."


@pytest.mark.parametrize(
    ("measured", "sentences"),
    [
        (LABELS | FEATURES, [LABEL_SENTENCE, FEATURE_SENTENCE]),
        (LABELS, [LABEL_SENTENCE]),  # texts
        (FEATURES, [FEATURE_SENTENCE]),  # a regression
        ({}, []),  # the clients are real sites
    ],
)
def test_the_report_states_the_skews_of_its_runs(tmp_path, measured, sentences):
    for seed in (1, 2):
        more = 0.2 * (seed - 1)
        skews = {key: number + more for key, number in measured.items()}
        if "partition/jensen_shannon" in skews:
            skews["partition/jensen_shannon"] = 0.4
        summary = {"rounds": 1} | skews
        write_run(tmp_path / f"{seed}", [{"test/acc": 0.5}], "gc=none", summary=summary, seed=seed)
    page = write_report(tmp_path, out=tmp_path / "report", figures=False).read_text()
    stated = [text for text in (LABEL_SENTENCE, FEATURE_SENTENCE) if text in page]
    assert stated == sentences
    assert page.count("skew,") == len(sentences)


@pytest.mark.parametrize("key", [*LABELS, *FEATURES])
def test_a_run_whose_skew_is_no_number_is_left_out(tmp_path, key):
    for seed, skew in ((1, 0.5), (2, "<b>much</b>")):
        summary = {"rounds": 1, **LABELS, **FEATURES, key: skew}
        write_run(tmp_path / f"{seed}", [{"test/acc": 0.5}], "gc=none", summary=summary, seed=seed)
    page = write_report(tmp_path, out=tmp_path / "report", figures=False).read_text()
    assert f"{key} in summary.json" in page
    assert "<b>much</b>" not in page
