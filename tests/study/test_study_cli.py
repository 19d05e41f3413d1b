"""A study as a user types it, with real runs on the digits."""

import os
import subprocess
import sys

import pytest
import yaml
from conftest import read_rows

from gcfed.utils.resolvers import ROOT

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
pytestmark = pytest.mark.slow


def test_a_study_names_what_failed_skips_what_is_finished_and_continues_the_rest(tmp_path):
    (tmp_path / "conf" / "study").mkdir(parents=True)
    (tmp_path / "conf" / "study" / "tiny.yaml").write_text(STUDY.lstrip())

    def call(*arguments, code):
        command = [sys.executable, str(ROOT / "src" / "train.py"), "--config-dir", str(tmp_path / "conf"), "-m"]
        done = subprocess.run(
            [*command, "study=tiny", f"paths.log_dir={tmp_path / 'logs'}", *arguments],
            capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == code, said[-3000:]
        return said

    said = call(code=1)
    folder = tmp_path / "logs" / "study" / "tiny" / "full"
    assert "0 finished, 0 to continue, 2 to start" in said
    assert "broken, digits, seed 1: ValueError: gc.lam=2 must be a number from 0 to 1" in said
    assert str(folder / "broken_digits_s1") in said
    run = folder / "gc-fed_digits_s1"
    assert len(read_rows(run / "metrics.csv")) == 2
    assert not {"study", "scale"} & {line.split(":")[0] for line in (run / "config.yaml").read_text().splitlines()}
    assert not any(o.startswith(("study", "scale")) for o in yaml.safe_load((run / "overrides.yaml").read_text()))

    before = (run / "metrics.csv").read_text()
    said = call("study.rows=[gc-fed]", code=0)
    assert "1 finished, 0 to continue, 0 to start" in said
    assert (run / "metrics.csv").read_text() == before

    (run / "summary.json").unlink()
    said = call("study.rows=[gc-fed]", "rounds=3", code=0)
    assert "0 finished, 1 to continue, 0 to start" in said
    assert "resuming" in said
    assert (run / "summary.json").is_file()
    assert [row["round"] for row in read_rows(run / "metrics.csv")] == [1, 2, 3]
    assert (run / "metrics.csv").read_text().startswith(before)
