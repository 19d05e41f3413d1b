"""From a study to its jobs: which cells, which overrides, which folders; and what they compose to."""

import pytest
import yaml
from conftest import composer
from omegaconf import OmegaConf
from pretend import composed

from gcfed.study.jobs import read_jobs
from gcfed.utils.compose import Composer
from gcfed.utils.resolvers import ROOT

TABLE = {
    "overrides": ["rounds=8"],
    "rows": [{"label": "FedAvg", "overrides": ["gc=none"]}, {"label": "GC-Fed", "overrides": ["gc=gcfed", "rounds=9"]}],
    "columns": [
        {"label": "i.i.d., λ 0.1", "overrides": ["partition.alpha=0.1"]},
        {"label": "i.i.d., λ 1", "overrides": ["partition.alpha=1"]},
    ],
}
SCALES = {"small": {"rows": ["FedAvg"], "seeds": [4, 5], "overrides": ["rounds=2"]}}


def plan(*arguments, scale="full", **node):
    return read_jobs(scale, {"table": TABLE, "scales": SCALES, **node}, arguments)[0]


def folders(*arguments, **node):
    return [job.folder for job in plan(*arguments, **node)]


def test_rows_columns_and_seeds_become_jobs_with_folders_of_their_own():
    names = [f"{row}_iid-lambda-{value}" for row in ("fedavg", "gc-fed") for value in ("0.1", "1")]
    assert folders(seeds=[1, 2]) == [f"{name}_s{seed}" for seed in (1, 2) for name in names]
    job = plan(seeds=[1, 2])[6]
    assert job.title == "GC-Fed, i.i.d., λ 0.1, seed 2"
    assert job.overrides == ["partition.alpha=0.1", "rounds=8", "gc=gcfed", "rounds=9", "seed=2"]  # the row's last


def test_a_scale_and_the_command_line_choose_parts():
    jobs = plan("rounds=3", scale="small")
    assert [job.folder for job in jobs] == [f"fedavg_iid-lambda-{value}_s{s}" for s in (4, 5) for value in ("0.1", "1")]
    assert all(job.overrides[-3:] == ["rounds=2", f"seed={job.folder[-1]}", "rounds=3"] for job in jobs)
    assert folders(scale="small", rows=["GC-Fed"], columns=["*-0.1"], seeds=[7]) == ["gc-fed_iid-lambda-0.1_s7"]
    assert plan(rows=["fedavg", "FedAvg"]) == plan(rows=["FedAvg"])  # by label or by short name


@pytest.mark.parametrize(
    ("arguments", "suffix"),
    [
        (["rounds=3", "extras.figures=false", "metrics=drift", "client_store=disk", "ckpt_path=last"], ""),
        (["study=try", "scale=small", "study.seeds=[1]", "client.epochs=2", "trainer.devices=1"], ",client.epochs=2"),
        (["model.hidden=[64,32]", "+client.x='a b/c'"], ",client.x=-a-b-c-,model.hidden=[64,32]"),
    ],
)
def test_further_overrides_go_to_all_jobs_and_name_their_folder_where_they_change_results(arguments, suffix):
    jobs = plan(*arguments, seeds=[1])
    assert all(job.overrides[-1] == (arguments[-1] if suffix else arguments[-2]) for job in jobs)
    assert jobs[0].folder == f"fedavg_iid-lambda-0.1_s1{suffix}"


def test_a_long_name_of_a_folder_is_cut_and_still_its_own():
    one, other = (folders(f"a.b=[{','.join(map(str, range(k)))}]")[0] for k in (200, 201))
    assert (one == other, len(one) < 200) == (False, True)


def test_cells_with_the_same_overrides_are_one_job_named_by_the_first():
    columns = [{"label": f"{rounds}R", "overrides": ["x=1"]} for rounds in (500, 1000)]
    table = {"rows": [{"label": "r", "overrides": []}], "columns": columns}
    assert folders(table=table) == folders(table=table, columns=["1000R"]) == ["r_500r_s1"]
    ends = [{"label": str(i), "overrides": [f"x={i}"]} for i in (1, 2)]  # the row's word is the last: not the same
    turned = {"columns": ends, "rows": [{"label": f"r{i}", "overrides": [f"x={i}"]} for i in (1, 2)]}
    assert folders(table=turned) == ["r1_1_s1", "r2_1_s1"]


@pytest.mark.parametrize(
    ("node", "arguments", "message"),
    [
        ({"rows": ["FedAvgg"]}, (), r"study\.rows.*'FedAvgg'.*FedAvg \(fedavg\); GC-Fed \(gc-fed\)"),
        ({"rows": "FedAvg"}, (), r"study\.rows=FedAvg must be a list"),
        ({"seeds": [-1]}, (), r"study\.seeds=\[-1\] must be a list"),
        ({"scale": "tiny"}, (), r"scale=tiny must be full or small"),
        ({"table": None}, (), r"study\.table is not set"),
        ({"table": {"rows": TABLE["rows"]}}, (), r"study\.table needs rows and columns"),
        ({"table": {**TABLE, "columns": [{"label": "B"}, {"label": "B+"}]}}, (), r"B and B\+ have the same .* name"),
        ({}, ("study.overrides=['client.epochs=2']",), r"study\.overrides=.*by themselves"),
        ({}, ("seed=3",), r"study\.seeds=\[1,2,3\]"),
        ({}, ("ckpt_path=a/b.ckpt",), "ckpt_path"),
        ({}, ("gc.lam=0.1,0.2",), r"gc\.lam=0\.1,0\.2: a study sweeps over its rows"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(node, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        plan(*arguments, **node)


STUDIES = sorted({p.stem for p in (ROOT / "configs" / "study").glob("*.yaml")} - {"base"})


def test_every_study_that_is_shipped_can_be_read():
    """Names of rows and columns are those of the table, at both scales, and no two jobs share a folder."""
    for path in STUDIES:
        node = yaml.safe_load((ROOT / "configs" / "study" / f"{path}.yaml").read_text())["study"]
        (full, gaps), (small, _) = (read_jobs(scale, node) for scale in ("full", "small"))
        assert all(gaps)  # cells without a run say why
        for jobs in (full, small):
            assert len({job.folder for job in jobs}) == len({tuple(sorted(job.overrides)) for job in jobs}) == len(jobs)
        assert len(full) >= len(small) > 0, path
        assert not isinstance(node["table"], str) or node["table"] == path


def test_what_is_shared_is_what_hydra_composes():
    loaded = []
    compose = Composer(lambda overrides: loaded.append(overrides) or composed(*overrides), composer.groups)
    for value in (1, 2, 3):
        job = ["gc=none", f"partition.alpha={value}", "experiment=cifar10_cnn_gcfed", "rounds=7", "rounds=8"]
        assert OmegaConf.to_container(compose(job)) == OmegaConf.to_container(composed(*job))
        compose(job).rounds = 1  # the caller's own
    assert loaded == [["gc=none", "experiment=cifar10_cnn_gcfed"]]
    added = ["gc=none", "+client.new=3", "rounds=7", "~targets"]
    assert OmegaConf.to_container(compose(added)) == OmegaConf.to_container(composed(*added))
    with pytest.raises(ValueError, match="client"):
        compose([*added, "client.newer=3"])
