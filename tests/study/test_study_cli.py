"""A study as a user types it, with real runs on the digits."""

import pytest
from conftest import type_command

from gcfed.runs.folder import read_run

STUDY = """
# @package _global_
defaults: [base, _self_]
study:
  table:
    overrides: [rounds=2, client.epochs=1, participation.num_clients=8, data.limit_train=200, data.limit_test=50,
                extras.figures=false, trainer.devices=1]
    rows:
      - {label: broken, overrides: [gc=gcfed, gc.lam=2]}
      - {label: GC-Fed, overrides: [gc=gcfed]}
    columns:
      - {label: digits, overrides: []}
"""


@pytest.mark.slow
def test_a_study_names_what_failed_and_its_report_and_goes_on_with_more_rounds(tmp_path):
    (tmp_path / "conf" / "study").mkdir(parents=True)
    (tmp_path / "conf" / "study" / "tiny.yaml").write_text(STUDY.lstrip())

    def call(*arguments, code):
        words = ("--config-dir", str(tmp_path / "conf"), "-m", "study=tiny", f"paths.log_dir={tmp_path / 'logs'}")
        return type_command(tmp_path, "train.py", *words, *arguments, code=code)

    said = call(code=1)
    folder = tmp_path / "logs" / "study" / "tiny" / "full"
    assert "0 finished, 0 to continue, 2 to start" in said
    assert "broken, digits, seed 1: gc.lam=2 must be a number from 0 to 1" in said
    assert f"python src/report.py 'roots=[{folder}]'" in said
    run = read_run(folder / "gc-fed_digits_s1")
    assert (run.state, run.rounds) == ("finished", 2)
    assert not {"study", "scale"} & run.config.keys()

    said = call("study.rows=[gc-fed]", "rounds=3", code=0)
    assert "0 finished, 1 to continue, 0 to start" in said
    longer = read_run(run.folder)
    assert (longer.state, longer.rounds, longer.identity) == ("finished", 3, run.identity)
    assert longer.metrics.iloc[:2].equals(run.metrics)
