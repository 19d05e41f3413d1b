"""The jobs of a table: their cells, overrides and folders."""

import pytest

from gcfed.tables.plan import make_plan, measures_of_cells
from gcfed.tables.records import Selection, Table

ROWS = [
    {"label": "FedAvg", "overrides": ["gc=none"]},
    {"label": "GC-Fed", "overrides": ["gc=gcfed", "rounds=9"]},
]
TABLE = {
    "name": "try",
    "overrides": ["rounds=8"],
    "rows": ROWS,
    "columns": [
        {"label": "i.i.d., λ 0.1", "overrides": ["partition.alpha=0.1"]},
        {"label": "i.i.d., λ 1", "overrides": ["partition.alpha=1"]},
    ],
    "scales": {"small": {"rows": ["FedAvg"], "seeds": [4, 5], "overrides": ["rounds=2"]}},
}


def jobs(*arguments, scale="full", table=None, **selection):
    planned = make_plan(Table(**TABLE | (table or {})), scale, Selection(**selection), arguments)
    return [*planned.jobs.values()]


def folders(*arguments, **node):
    return [job.folder for job in jobs(*arguments, **node)]


def test_rows_columns_and_seeds_become_jobs_in_separate_folders():
    names = [f"{row}_iid-lambda-{value}" for row in ("fedavg", "gc-fed") for value in ("0.1", "1")]
    assert folders(seeds=[1, 2]) == [f"{name}_s{seed}" for seed in (1, 2) for name in names]
    job = jobs(seeds=[1, 2])[6]
    assert job.title == "GC-Fed, i.i.d., λ 0.1, seed 2"
    assert job.cell == "gc-fed_iid-lambda-0.1"
    assert job.seed == 2
    # the last word wins: the row's over the column's, and the column's over the table's
    assert job.overrides == ["rounds=8", "partition.alpha=0.1", "gc=gcfed", "rounds=9", "seed=2"]


def test_a_scale_and_the_command_line_select_cells():
    found = jobs("rounds=3", scale="small")
    assert [job.folder for job in found] == [
        f"fedavg_iid-lambda-{value}_s{s}" for s in (4, 5) for value in ("0.1", "1")
    ]
    assert all(
        job.overrides[-3:] == ["rounds=2", f"seed={job.folder[-1]}", "rounds=3"] for job in found
    )
    assert folders(scale="small", rows=["GC-Fed"], columns=["*-0.1"], seeds=[7]) == [
        "gc-fed_iid-lambda-0.1_s7"
    ]
    assert jobs(rows=["fedavg", "FedAvg"]) == jobs(rows=["FedAvg"])  # label and short name


@pytest.mark.parametrize(
    ("arguments", "suffix"),
    [
        (["rounds=3", "extras.figures=false", "metrics=drift", "client_store=disk"], ""),
        (["model.hidden=[64,32]", "+client.x='a b/c'"], ",client.x=-a-b-c-,model.hidden=[64,32]"),
    ],
)
def test_extra_overrides_apply_to_all_jobs_and_are_in_the_folders_name_if_they_change_results(
    arguments, suffix
):
    found = jobs(*arguments, seeds=[1])
    assert all(job.overrides[-len(arguments) :] == arguments for job in found)
    assert found[0].folder == f"fedavg_iid-lambda-0.1_s1{suffix}"


def test_a_table_that_names_no_measure_requires_no_column():
    """The runs say by which column they are compared: a regression has no accuracy."""
    named = Table(**TABLE | {"measure": "last:test/acc"})
    for table, asked in ((Table(**TABLE), {}), (named, {"last:test/acc": "measure=last:test/acc"})):
        measures = measures_of_cells(table, make_plan(table, "full", Selection()))
        assert len(measures) == 4
        assert all(of_cell == asked for of_cell in measures.values())


def test_a_long_name_of_a_folder_is_cut_and_stays_unique():
    one, other = (folders(f"a.b=[{','.join(map(str, range(k)))}]")[0] for k in (200, 201))
    assert one != other
    assert len(one) < 200


def test_cells_with_the_same_overrides_are_one_job_named_after_the_first():
    columns = [{"label": f"{rounds}R", "overrides": ["x=1"]} for rounds in (500, 1000)]
    table = {"rows": [{"label": "r", "overrides": []}], "columns": columns}
    assert folders(table=table) == folders(table=table, columns=["1000R"]) == ["r_500r_s1"]
    # different, because the row's value wins
    ends = [{"label": str(i), "overrides": [f"x={i}"]} for i in (1, 2)]
    turned = {
        "columns": ends,
        "rows": [{"label": f"r{i}", "overrides": [f"x={i}"]} for i in (1, 2)],
    }
    assert folders(table=turned) == ["r1_1_s1", "r2_1_s1"]


@pytest.mark.parametrize(
    ("arguments", "node", "message"),
    [
        (
            (),
            {"rows": ["FedAvgg"]},
            r"rows: there is no 'FedAvgg'.*FedAvg \(fedavg\); GC-Fed \(gc-fed\)",
        ),
        ((), {"seeds": [1, 1]}, r"seeds=\[1, 1\] must be a list without repetitions"),
        ((), {"scale": "tiny"}, r"scale=tiny must be full or small"),
        (
            (),
            {"table": {"columns": [{"label": "B"}, {"label": "B+"}]}},
            r"B and B\+ have the same .* name",
        ),
        (("seed=3",), {}, r"seed=3: write seeds=\[1,2,3\]"),
        (("gc.lam=0.1,0.2",), {}, r"gc\.lam=0\.1,0\.2: a table sweeps over its rows"),
    ],
)
def test_the_error_of_a_mistake_names_the_remedy(arguments, node, message):
    with pytest.raises(ValueError, match=message):
        jobs(*arguments, **node)
