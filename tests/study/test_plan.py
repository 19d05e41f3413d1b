"""From a study to its jobs: which cells, which overrides, which folders."""

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from gcfed.report.papers import names
from gcfed.study.grid import read_grid
from gcfed.study.overrides import merge, quoted, slug, suffix
from gcfed.study.plan import jobs_of, read_study
from gcfed.utils.resolvers import ROOT

TABLE = {
    "overrides": ["rounds=8"],
    "rows": [
        {"label": "FedAvg", "overrides": ["gc=none"]},
        {"label": "GC-Fed", "overrides": ["gc=gcfed", "rounds=9"]},
        {"label": "Other", "overrides": None, "note": "no such method"},
    ],
    "columns": [
        {"label": "digits, α 0.1", "overrides": ["partition.alpha=0.1"]},
        {"label": "digits, α 1", "overrides": ["partition.alpha=1"]},
    ],
}
SCALES = {"small": {"rows": ["FedAvg"], "seeds": [4, 5], "overrides": ["rounds=2"]}}


def plan(*arguments, scale="full", **node):
    return jobs_of(read_study("try", scale, {"table": TABLE, "scales": SCALES, **node}, arguments))


def test_rows_columns_and_seeds_become_jobs_with_folders_of_their_own():
    jobs, left_out = plan(seeds=[1, 2])
    assert [job.folder for job in jobs] == [
        f"{row}_digits-alpha-{alpha}_s{seed}"
        for seed in (1, 2)
        for row in ("fedavg", "gc-fed")
        for alpha in ("0.1", "1")
    ]
    assert jobs[0].overrides == ("partition.alpha=0.1", "rounds=8", "gc=none", "seed=1")
    assert jobs[2].overrides == ("partition.alpha=0.1", "gc=gcfed", "rounds=9", "seed=1")  # the row's word is the last
    assert jobs[5].title == "FedAvg, digits, α 1, seed 2"
    assert left_out == {"no such method": ["Other, digits, α 0.1", "Other, digits, α 1"]}


def test_a_scale_and_the_command_line_choose_parts():
    jobs, left_out = plan(scale="small")
    assert [job.folder for job in jobs] == [f"fedavg_digits-alpha-{a}_s{s}" for s in (4, 5) for a in ("0.1", "1")]
    assert all("rounds=2" in job.overrides and "rounds=8" not in job.overrides for job in jobs)
    assert not left_out
    jobs, _ = plan(scale="small", rows=["GC-Fed"], columns=["*-0.1"], seeds=[7])  # wins over the scale's choice
    assert [job.folder for job in jobs] == ["gc-fed_digits-alpha-0.1_s7"]
    assert "rounds=2" in jobs[0].overrides
    assert plan(rows=["fedavg", "FedAvg"])[0] == plan(rows=["FedAvg"])[0]  # by label or by short name


def test_further_overrides_go_to_all_jobs_and_name_their_folder_where_they_change_results():
    jobs, _ = plan(
        "study=try", "scale=small", "study.rows=[FedAvg]", "client.epochs=2", "rounds=3", "trainer.devices=1"
    )
    assert all(job.overrides[-3:] == ("client.epochs=2", "rounds=3", "trainer.devices=1") for job in jobs)
    assert jobs[0].folder == "fedavg_digits-alpha-0.1_s1,client.epochs=2"
    assert not any(job.overrides[0].startswith(("study", "scale")) for job in jobs)
    assert plan("rounds=3")[0][0].folder == plan()[0][0].folder  # more or fewer rounds of the same run
    assert plan("ckpt_path=last")[0] == plan()[0]  # a study continues anyway


def test_numbers_of_the_same_run_are_one_job_named_by_what_they_share():
    columns = [
        {"label": "A, 500R", "overrides": ["x=1"]},
        {"label": "A, 1000R", "overrides": ["x=1"]},
        {"label": "B", "overrides": ["x=2"]},
    ]
    rows = [{"label": "r/d 1", "overrides": []}, {"label": "r/d 2", "overrides": []}]
    both = {"rows": rows, "columns": columns}
    assert [job.folder for job in plan(table=both)[0]] == ["a_s1", "b_s1"]  # rows say nothing here
    rows[1]["overrides"] = ["y=1"]
    expected = ["r-d-1_a_s1", "r-d-1_b_s1", "r-d-2_a_s1", "r-d-2_b_s1"]
    assert [job.folder for job in plan(table=both)[0]] == expected
    assert plan(table=both, columns=["A, 1000R"])[0][0].folder == "r-d-1_a_s1"  # whichever of them is chosen


def test_no_cell_takes_the_folder_of_another_one():
    """A number that keeps two cells apart may be in the name of a third one."""
    columns = [{"label": label, "overrides": [f"gc={gc}"]} for label, gc in zip(("A+", "A", "A 2"), "xyz", strict=True)]
    jobs, _ = plan(table={"rows": [{"label": "r", "overrides": []}], "columns": columns})
    assert [(job.folder, job.overrides[0]) for job in jobs] == [
        ("r_a_s1", "gc=x"), ("r_a-2_s1", "gc=y"), ("r_a-2-2_s1", "gc=z"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "arguments", "message"),
    [
        ({"rows": ["FedAvgg"]}, (), r"study\.rows.*'FedAvgg'.*FedAvg \(fedavg\); GC-Fed \(gc-fed\)"),
        ({"rows": "FedAvg"}, (), r"study\.rows=FedAvg must be a list"),
        ({"seeds": [-1]}, (), r"study\.seeds"),
        ({"tables": 1}, (), r"study\.tables is unknown"),
        ({"dry_run": 1}, (), r"study\.dry_run"),
        ({"scales": {"small": {"row": []}}}, (), r"study\.scales\.small\.row is unknown"),
        ({"table": None}, (), r"study\.table is not set"),
        ({"table": {**TABLE, "cells": {}}}, (), r"study\.table\.cells is unknown"),
        ({"table": {"rows": TABLE["rows"]}}, (), r"study\.table\.columns is empty"),
        ({"table": {**TABLE, "rows": TABLE["rows"][:1] * 2}}, (), "twice"),
        ({}, ("study.overrides=[client.epochs=2]",), r"study\.overrides=.*by themselves"),
        ({}, ("seed=3",), r"study\.seeds=\[1,2,3\]"),
        ({}, ("ckpt_path=a/b.ckpt",), "ckpt_path"),
        ({}, ("gc.lam=0.1,0.2",), "several values"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(node, arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments, **node)


def test_an_unknown_scale_or_table_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"scale=tiny is unknown: try has full, small"):
        plan(scale="tiny")
    with pytest.raises(FileNotFoundError, match="gcfed_table5"):
        plan(table="gcfed_table55")


def test_texts_of_overrides():
    assert merge(["a=1", "b=2"], ["+a=3"], ["~c"]) == ("b=2", "+a=3", "~c")
    assert slug("CIFAR-10, 5/100, α 0.05") == "cifar-10-5-100-alpha-0.05"
    assert slug("i.i.d., μ = 1.") == "iid-mu-1"
    assert suffix(["rounds=3", "extras.figures=false", "metrics=drift"]) == ""
    assert suffix(["model.hidden=[64,32]", "+client.x=a b/c"]) == ",client.x=a-b-c,model.hidden=[64,32]"
    long = [suffix([f"a.b=[{','.join(map(str, range(k)))}]"]) for k in (200, 201)]
    assert long[0] != long[1]
    assert max(map(len, long)) <= 120


@pytest.mark.parametrize("text", ["/a b/c,d=e", "it's", "back\\slash\\", "x\\'y"])
def test_a_quoted_value_is_read_back_as_it_is(text):
    assert OverridesParser.create().parse_override(f"a={quoted(text)}").value() == text


STUDIES = {p.stem for p in (ROOT / "configs" / "study").glob("*.yaml")} - {"base"}


@pytest.mark.parametrize("path", sorted(STUDIES))
def test_every_study_that_is_shipped_can_be_planned(path):
    """Names of rows and columns are those of the table, at both scales, and no two jobs share a folder."""
    node = yaml.safe_load((ROOT / "configs" / "study" / f"{path}.yaml").read_text())["study"]
    counts = {}
    for scale in ("full", "small"):
        jobs, _ = jobs_of(read_study(path, scale, node))
        counts[scale] = len(jobs)
        assert jobs
        assert len({job.folder for job in jobs}) == len({tuple(sorted(job.overrides)) for job in jobs}) == len(jobs)
    assert counts["small"] <= counts["full"]
    assert node["table"] == path if isinstance(node["table"], str) else "fig" in path


def test_every_table_has_a_study():
    assert set(names()) <= STUDIES
    assert read_grid("gcfed_table5").seeds == 3
