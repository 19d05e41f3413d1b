"""CSV files: the inputs, the test rows, the clients, and what is refused."""

import re
import unicodedata

import numpy as np
import pandas as pd
import pytest
from conftest import refuses

from gcfed.data.sets.table import csv
from gcfed.run import train
from gcfed.utils.refusal import says_all

ROWS = [(20 + i, "abc"[i % 3], i % 4, "yes" if i % 2 else "no", i / 2) for i in range(20)]
HEAD = "age,work,code,paid,rate"


def write(path, rows=ROWS, head=HEAD):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def by_age(dataset):
    return {
        int(x[0]): (x[1:].tolist(), y)
        for part in (dataset.train, dataset.test)
        for x, y in zip(part.x, part.y.tolist(), strict=True)
    }


def test_numbers_are_kept_and_each_category_gets_a_column(tmp_path):
    dataset = csv(
        write(tmp_path / "people.csv"), target="paid", categorical=["code"], ignore=["rate"]
    )
    assert dataset.name == "people"
    assert dataset.num_classes == 2
    assert dataset.class_names == ("no", "yes")
    # a fifth of each class
    assert len(dataset.train) == 16
    assert np.bincount(dataset.test.y).tolist() == [2, 2]
    assert dataset.train.groups is None
    expected = {
        age: (
            [*(float(work == x) for x in "abc"), *(float(code == x) for x in range(4))],
            int(paid == "yes"),
        )
        for age, work, code, paid, _ in ROWS
    }
    assert by_age(dataset) == expected
    numbers = csv(write(tmp_path / "people.csv"), target="code", ignore=["work", "paid"])
    assert by_age(numbers) == {age: ([rate], code) for age, _, code, _, rate in ROWS}
    targets = csv(
        write(tmp_path / "people.csv"), target="code", ignore=["work", "paid"], regression=True
    )
    assert targets.num_classes == 1
    assert targets.train.y.dtype == np.float64
    assert by_age(targets) == {age: ([rate], [code]) for age, _, code, _, rate in ROWS}


def test_row_numbers_of_pandas_are_no_feature(tmp_path, caplog):
    """If a file is sorted by class, row numbers would predict the class."""
    pd.DataFrame(ROWS, columns=HEAD.split(",")).to_csv(tmp_path / "x.csv")
    options = {"target": "paid", "ignore": ["work", "code", "rate"]}
    assert by_age(csv(str(tmp_path / "x.csv"), **options)) == by_age(
        csv(write(tmp_path / "y.csv"), **options)
    )
    assert "x.csv: columns without a name are left out" in caplog.text


@pytest.mark.parametrize("name", ["NA", "null"])
def test_a_column_may_have_the_name_of_an_empty_cell(tmp_path, name):
    (tmp_path / "x.csv").write_text(
        f"{name},k,y\n" + "".join(f"{i},{i % 3},{i % 2}\n" for i in range(20))
    )
    assert csv(str(tmp_path / "x.csv"), target="y").train.x.shape[1] == 2


def test_one_file_per_client_and_one_file_of_tests(tmp_path):
    """The clients have the order of the file names."""
    parts = {"b": ROWS[:5], "a": ROWS[5:9], "c": ROWS[9:12], "Test": ROWS[12:16], "val": ROWS[16:]}
    for name, rows in parts.items():
        write(tmp_path / "sites" / f"{name}.csv", rows)
    dataset = csv(str(tmp_path / "sites"), target="paid", ignore=["work"])
    assert dataset.train.x[:, 0].tolist() == [*range(25, 29), *range(20, 25), *range(29, 32)]
    assert dataset.train.groups.tolist() == [0] * 4 + [1] * 5 + [2] * 3
    assert dataset.test.x[:, 0].tolist() == [32, 33, 34, 35]
    owned = csv(write(tmp_path / "one.csv"), target="paid", groups="work")
    assert owned.train.x.shape == (16, 3)
    np.testing.assert_array_equal(owned.train.groups, (owned.train.x[:, 0] - 20) % 3)


@pytest.mark.parametrize(
    "form", [{"sep": "semicolon", "decimal": ","}, {"sep": "tab", "encoding": "utf-16"}]
)
def test_separators_decimal_commas_and_encodings_are_settings(tmp_path, form):
    frame = pd.DataFrame(
        {"n": range(30, 60), "age": np.arange(30) + 0.5, "town": ["Köln", "Ulm", "Bonn"] * 10}
    )
    frame["y"] = ["ja", "nein"] * 15
    sep = {"tab": "\t", "semicolon": ";"}[form["sep"]]
    frame.to_csv(tmp_path / "x.csv", index=False, **form | {"sep": sep})
    read = csv(str(tmp_path / "x.csv"), target="y", **form)
    assert read.class_names == ("ja", "nein")
    assert read.train.x.shape == (24, 5)
    assert by_age(read) == {
        i + 30: ([i + 0.5, *(float(town == t) for t in ("Bonn", "Köln", "Ulm"))], i % 2)
        for i, town in enumerate(frame.town)
    }


@pytest.mark.parametrize(
    "cell", [lambda i: f"2024-01-{i % 28 + 1:02}", lambda i: f'"1,{i:03}"', lambda i: i or "?"]
)
def test_texts_that_are_no_categories_are_refused(tmp_path, cell):
    """The texts are dates, numbers in another notation, and numbers with a missing value."""
    path = write(
        tmp_path / "x.csv", [(i // 2, cell(i), "ab"[i % 2]) for i in range(320)], "age,text,y"
    )
    words = (
        r"(has (28|320) texts in 320 rows, such as|holds text in 1 of 320 cells \(\?\): correct)"
        r" .*data\.categorical=\[text\].*data\.ignore=\[text\]"
    )
    with refuses(rf"^column text {words}"):
        csv(path, target="y")
    assert csv(path, target="y", categorical=["text"]).train.x.shape[1] > 20


def test_empty_cells_are_refused(tmp_path):
    rows = [list(row) for row in ROWS]
    rows[3][4] = ""
    rows[4][1] = ""
    path = write(tmp_path / "x.csv", rows)
    for column, others in (("rate", ["work"]), ("work", ["rate"])):
        words = (
            rf"^column {column} has 1 empty cells \(or NA, .* of 20: .*data\.ignore=\[{column}\]"
        )
        with refuses(words):
            csv(path, target="paid", ignore=others)
    assert csv(path, target="paid", ignore=["work", "rate"]).train.x.shape == (16, 2)


def messages_of(caplog, content, **options):
    """The log of reading a table."""
    caplog.set_level("INFO")
    caplog.clear()
    csv(content, **options)
    return "\n".join(caplog.messages)


def test_columns_that_become_something_else_are_named(tmp_path, caplog):
    """Numbers with a missing value, ids, categories that only test rows have, and all others."""
    rows = [(i, "?" if i == 9 else i % 7, "ab"[i % 2]) for i in range(30)]
    text = messages_of(caplog, write(tmp_path / "x.csv", rows, "id,size,y"), target="y")
    assert "column id: all whole numbers are different, as in a column of ids" in text
    assert "data.ignore=[id] leaves it out" in text
    assert "column size: 1 of its 8 values are no numbers (?), so that all are categories" in text
    assert re.search(r"column size becomes [78] columns of 0 and 1: 0, 1, 2, 3, 4, …", text)
    again = messages_of(caplog, str(tmp_path / "x.csv"), target="y", categorical=["id", "size"])
    assert "different" not in again
    assert "no numbers" not in again
    for name, kinds in (("a", "xy"), ("test", "xz")):
        rows = [(i, kinds[i % 2], i % 2) for i in range(30)]
        write(tmp_path / "s" / f"{name}.csv", rows, "id,kind,y")
    text = messages_of(caplog, str(tmp_path / "s"), target="y")
    assert "column id: all whole numbers are different" in text  # in each file
    assert "column kind becomes 2 columns of 0 and 1: x, y" in text
    assert "column kind: 1 texts, such as 'z', are in test rows only" in text


@pytest.mark.parametrize(
    ("form", "warned"),
    [
        ('"{},000"', True),
        ("{} %", True),
        ("${}", True),
        ("−{}", True),
        ("1{}-20", False),
        ("2024-01-0{}", False),
        ("type {}", False),
        ("0{}", False),
    ],
)
def test_numbers_in_another_notation_are_named(tmp_path, caplog, form, warned):
    rows = [(i / 3, form.format(i % 4), i % 2) for i in range(30)]
    text = messages_of(caplog, write(tmp_path / "x.csv", rows, "a,size,y"), target="y")
    assert ("column size: 4 of its 4 values are no numbers" in text) == warned
    assert "column size becomes 4 columns" in text


@pytest.mark.parametrize("use", [{"target": "kind", "ignore": ["y"]}, {"target": "y"}])
def test_a_nul_character_is_refused(tmp_path, use):
    """NumPy drops it at the end of a text, so that two texts would be one."""
    rows = [(i / 3, ("a", "a\0")[i % 2], i % 2) for i in range(30)]
    path = write(tmp_path / "x.csv", rows, "a,kind,y")
    with refuses(r"^column kind holds a NUL character: write the file again"):
        csv(path, **use)


def test_texts_of_one_number_are_different_classes_with_a_warning(tmp_path, caplog):
    rows = [(i / 2, ("1", "1.0", "2")[i % 3]) for i in range(30)]
    path = write(tmp_path / "x.csv", rows, "a,y")
    text = messages_of(caplog, path, target="y")
    assert "x.csv: 3 classes: 1, 1.0, 2" in text
    assert "1 of the classes nearly equal another one, such as '1' and '1.0'" in text
    rows = [(i / 2, 12 - i % 12) for i in range(36)]
    numbers = csv(write(tmp_path / "y.csv", rows, "a,y"), target="y")
    assert numbers.class_names == tuple(map(str, range(1, 13)))  # 2 comes before 10


@pytest.mark.parametrize("cell", ["inf", "-Infinity", "1e999"])
def test_infinite_numbers_are_named(tmp_path, cell):
    rows = [(cell if i == 3 else i / 3, i % 2) for i in range(30)]
    with refuses(rf"^column rate holds '{cell}', which is no finite"):
        csv(write(tmp_path / "x.csv", rows, "rate,y"), target="y")


def test_names_of_columns_have_one_form(tmp_path):
    """A file from a Mac may hold ö as two characters."""
    rows = [(i / 3, i % 2) for i in range(30)]
    path = write(tmp_path / "x.csv", rows, unicodedata.normalize("NFD", "größe") + ",y")
    assert csv(path, target="größe", regression=True).num_classes == 1


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zip"])
def test_compressed_tables_are_read(tmp_path, suffix):
    frame = pd.DataFrame({"n": range(30), "y": [0, 1] * 15})
    (tmp_path / "s").mkdir()
    for name in ("a", "b"):
        frame.to_csv(tmp_path / "s" / f"{name}.csv.{suffix}", index=False)
    assert csv(str(tmp_path / "s"), target="y").train.groups.max() == 1
    assert len(csv(str(tmp_path / "s" / f"a.csv.{suffix}"), target="y").train) == 24
    (tmp_path / "s" / f"b.csv.{suffix}").write_bytes(b"no archive")
    with refuses(rf"b\.csv\.{suffix} cannot be read as a CSV file: "):
        csv(str(tmp_path / "s"), target="y")
    frame.to_csv(tmp_path / "s" / "b.csv", index=False)
    with refuses("have the same name: take one of them away"):
        csv(str(tmp_path / "s"), target="y")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"target": None},
            r"^data\.target is not set: name a column\. There are age, work, code, paid, rate\.$",
        ),
        (
            {"target": "pai"},
            r"^data\.target=pai is no column: did you mean paid\?$",
        ),
        ({"ignore": ["x"]}, r"^data\.ignore=x is no column"),
        ({"groups": "site"}, r"^partition\.by=site is no column"),
        (
            {"target": "rate"},
            r"^data\.target=rate holds numbers with fractions: data\.regression=true",
        ),
        ({"regression": True}, r"^data\.target=paid holds 'no', .* see data\.decimal"),
        ({"sep": "||"}, r"^sep=\|\| must be one character, semicolon or tab"),
        ({"encoding": "utf-7000"}, r"unknown encoding: utf-7000: see .*data\.encoding"),
    ],
)
def test_invalid_settings_are_named(tmp_path, options, words):
    with refuses(words):
        csv(write(tmp_path / "x.csv"), **{"target": "paid"} | options)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\n1,2,3\n4\n1,2,3,4\n", "cannot be read as a CSV file"),
        (b"a;b\n1.5;2\n2.5;3\n", r"it has one column, .*: a;b: see data\.sep=semicolon"),
        # pandas would read the second as a feature b.1
        (b"age,b,b\n1,2,3\n", r"two of one name: age, b, b: "),
        (b"", r"a\.csv cannot be read as a CSV file: No columns"),
        (b"PK\x03\x04...", r"a\.csv is an Excel file: save it as CSV"),
    ],
)
def test_invalid_files_are_named(tmp_path, content, words):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with refuses(words) as refused:
        csv(str(path), target="b")
    assert says_all(refused.value)


def test_invalid_folders_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"data\.path=null is no CSV file, .* as in data\.path=people\.csv"
    ):
        csv(None, target="paid")
    with pytest.raises(FileNotFoundError, match=r"data\.path=x/y\.csv: there is no such file"):
        csv("x/y.csv", target="paid")
    write(tmp_path / "s" / "a.csv")
    write(tmp_path / "s" / "b.csv", head="age,job,code,paid,rate")
    with refuses(r"b\.csv .* has no row, or other columns than .*a\.csv: age, job, code"):
        csv(str(tmp_path / "s"), target="paid")


def test_a_run_on_a_table_in_any_units(config, tmp_path):
    """Targets of 100,000 ± 50,000 would make the loss NaN if they were not standardised."""
    rng = np.random.default_rng(0)
    income = rng.normal(4e4, 1e4, 300)
    town = rng.choice(["north", "south"], 300)
    price = 1e5 + 4 * (income - 4e4) + 3e4 * (town == "north")
    pd.DataFrame({"income": income, "town": town, "price": price}).to_csv(
        tmp_path / "houses.csv", index=False
    )
    mine = (
        "data=csv",
        f"data.path={tmp_path}/houses.csv",
        "data.target=price",
        "data.regression=true",
        "rounds=6",
        "participation.num_clients=5",
        "partition=iid",
        "model.hidden=[16]",
        "client.epochs=3",
    )
    result = train(config(*mine, folder=tmp_path / "scaled"))
    data = result.trainer.datamodule
    assert data._tests[0][1].std() == pytest.approx(1, abs=0.3)
    assert result.metrics["test/loss"] < 0.3
    y = data.dataset.train.y
    std = data.scaling["y_std"]
    np.testing.assert_allclose(std, y.std(0), rtol=1e-6)
    with np.load(tmp_path / "scaled" / "scaling.npz") as scaling:
        assert all(np.array_equal(scaling[name], array) for name, array in data.scaling.items())
    assert result.module.task.target_std.tolist() == pytest.approx(std.tolist())
    raw = train(config(*mine, "data.standardize=false", "rounds=1", folder=tmp_path / "raw"))
    assert not raw.metrics["test/loss"] < 1e6
