"""CSV files: what becomes of each cell, which rows are tested, whose they are, and what is refused."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gcfed.data.sets.table import csv
from gcfed.run import train

ROWS = [(20 + i, "abc"[i % 3], i % 4, "yes" if i % 2 else "no", i / 2) for i in range(20)]
HEAD = "age,work,code,paid,rate"


def write(path, rows=ROWS, head=HEAD):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def by_age(dataset):
    return {int(x[0]): (x[1:].tolist(), y) for part in (dataset.train, dataset.test)
            for x, y in zip(part.x, part.y.tolist(), strict=True)}  # fmt: skip


def test_numbers_stay_and_each_value_of_a_category_has_a_column(tmp_path):
    dataset = csv(write(tmp_path / "people.csv"), target="paid", categorical=["code"], ignore=["rate"])
    assert (dataset.name, dataset.num_classes, dataset.class_names) == ("people", 2, ("no", "yes"))
    assert (len(dataset.train), np.bincount(dataset.test.y).tolist()) == (16, [2, 2])  # a fifth of each class
    assert dataset.train.groups is None
    expected = {
        age: ([*(float(work == x) for x in "abc"), *(float(code == x) for x in range(4))], int(paid == "yes"))
        for age, work, code, paid, _ in ROWS
    }
    assert by_age(dataset) == expected
    numbers = csv(write(tmp_path / "people.csv"), target="code", ignore=["work", "paid"])
    assert by_age(numbers) == {age: ([rate], code) for age, _, code, _, rate in ROWS}


def test_targets_to_regress_on_are_numbers_whole_or_not(tmp_path):
    for target, place in (("rate", 4), ("code", 2)):
        dataset = csv(write(tmp_path / "x.csv"), target=target, ignore=["work", "paid"], regression=True)
        assert (dataset.num_classes, dataset.train.y.dtype) == (1, np.float64)
        assert {age: y for age, (_, y) in by_age(dataset).items()} == {row[0]: [row[place]] for row in ROWS}


def test_the_row_numbers_that_pandas_writes_are_no_feature(tmp_path, caplog):
    """They tell the class of a file that is sorted by it."""
    frame = pd.DataFrame(ROWS, columns=HEAD.split(","))
    frame.to_csv(tmp_path / "x.csv")
    options = {"target": "paid", "ignore": ["work", "code", "rate"]}
    assert by_age(csv(str(tmp_path / "x.csv"), **options)) == by_age(csv(write(tmp_path / "y.csv"), **options))
    assert "taken for the rows' numbers" in caplog.text
    kept = csv(str(tmp_path / "x.csv"), **options, categorical=["Unnamed: 0"])
    assert kept.train.x.shape[1] > 1


def test_a_column_of_numbers_with_a_word_among_them_is_refused(tmp_path):
    rows = [(20 + i, "?" if i in (3, 7) else i, i % 2) for i in range(20)]
    path = write(tmp_path / "x.csv", rows, "age,power,label")
    with pytest.raises(ValueError, match=r"column power holds numbers and '\?': .* empty such cells .*\.categorical"):
        csv(path, target="label", missing="mean")
    assert csv(path, target="label", ignore=["power"]).train.x.shape[1] == 1
    assert csv(path, target="label", categorical=["power"]).train.x.shape[1] > 10
    few = [(age, "word" if i % 2 else i, label) for i, (age, _, label) in enumerate(rows)]
    assert csv(write(tmp_path / "y.csv", few, "age,power,label"), target="label").train.x.shape[1] > 2


def test_a_file_a_client_and_a_file_to_test_on(tmp_path, caplog):
    """By their names, whatever the order in which the system lists them, here that of their making or its reverse."""
    parts = {"b": ROWS[:5], "a": ROWS[5:9], "c": ROWS[9:12], "test": ROWS[12:16], "val": ROWS[16:]}
    for name, rows in parts.items():
        write(tmp_path / "sites" / f"{name}.csv", rows)
    dataset = csv(str(tmp_path / "sites"), target="paid", ignore=["work"])
    assert dataset.train.x[:, 0].tolist() == [*range(25, 29), *range(20, 25), *range(29, 32)]
    assert dataset.train.groups.tolist() == [0] * 4 + [1] * 5 + [2] * 3
    assert dataset.test.x[:, 0].tolist() == [32, 33, 34, 35]
    for name in ("a", "c", "val"):
        (tmp_path / "sites" / f"{name}.csv").unlink()
    assert csv(str(tmp_path / "sites"), target="paid").train.groups is None  # of one client there is nothing natural
    owned = csv(write(tmp_path / "one.csv"), target="paid", groups="work")
    assert owned.train.x.shape == (16, 3)
    np.testing.assert_array_equal(owned.train.groups, (owned.train.x[:, 0] - 20) % 3)
    assert not caplog.text
    assert len(set(csv(write(tmp_path / "one.csv"), target="paid", groups="age").train.groups)) == 16
    assert "one.csv: 4 of 20 groups have all their samples in the test split" in caplog.text


def test_a_table_is_the_same_in_one_file_and_in_several(tmp_path):
    """Also where one part of a column holds numbers, and the other a word among them."""
    rows = [(i, ("01", "2", "X9")[i % 3] if i > 9 else ("01", "2")[i % 2], i % 2) for i in range(20)]
    parts = {"whole": [rows], "cut": [rows[:10], rows[10:]]}
    for folder, files in parts.items():
        for i, part in enumerate(files):
            write(tmp_path / folder / f"{i}.csv", part, "age,code,label")
    for options in ({"target": "code", "categorical": ["code"]}, {"target": "label", "categorical": ["code"]}):
        whole, cut = (csv(str(tmp_path / folder), **options) for folder in parts)
        assert (whole.class_names, by_age(whole)) == (cut.class_names, by_age(cut))
    assert csv(str(tmp_path / "cut"), target="code", categorical=["code"]).class_names == ("01", "2", "X9")


CODES = ("01234", "1234", "02345", "2345", "00")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("files", [1, 3])
def test_codes_keep_their_zeros(tmp_path, files, encoding):
    """As a feature, named categorical or not, as the target and as clients; also where one file alone has zeros."""
    codes = [CODES[i % 5] if i < 20 else "1234" for i in range(60)]
    for k in range(files):
        rows = [(i, codes[i], "ab"[i % 2]) for i in range(60 * k // files, 60 * (k + 1) // files)]
        path = Path(write(tmp_path / "zips" / f"{k}.csv", rows, "age,zip,y"))
        path.write_text(path.read_text(), encoding)
    for more in ({}, {"categorical": ["zip"]}):
        dataset = csv(str(tmp_path / "zips"), target="y", encoding=encoding, **more)
        seen = {(codes[int(x[0])], tuple(x[1:])) for split in (dataset.train, dataset.test) for x in split.x}
        assert len(seen) == len({row for _, row in seen}) == 5
    assert csv(str(tmp_path / "zips"), target="zip", ignore=["y"], encoding=encoding).class_names == tuple(
        sorted(CODES)
    )
    owners = csv(str(tmp_path / "zips"), target="y", groups="zip", encoding=encoding).train
    assert len({(codes[int(x[0])], owner) for x, owner in zip(owners.x, owners.groups, strict=True)}) == 5


@pytest.mark.parametrize(
    ("head", "name"), [("age,y,y", "y"), ("age,age,y", "age"), ("y , age, y", "y"), ('"y",age,y', "y"), ("1,0,0", "0")]
)
def test_a_header_that_names_a_column_twice_is_refused(tmp_path, head, name):
    """pandas would call the second y y.1, and it would be a feature."""
    path = write(tmp_path / "t" / "b.csv", [(i, i % 3, i % 2) for i in range(20)], head)
    write(tmp_path / "t" / "a.csv", [(i, 7, i % 2) for i in range(20)], "age,sex,y")
    for place in (path, str(tmp_path / "t")):
        with pytest.raises(ValueError, match=rf"b\.csv cannot .*: the header has 2 columns {name}: rename all but one"):
            csv(place, target="y")


FORMS = [
    {}, {"sep": ";"}, {"sep": "semicolon", "decimal": ","}, {"sep": "tab"}, {"sep": "\\t", "decimal": ","},
    {"sep": "|"}, {"encoding": "latin-1"}, {"encoding": "utf-16"}, {"encoding": "utf-8-sig"},
    {"encoding": "cp1252", "sep": ";"},
]  # fmt: skip


@pytest.mark.parametrize("written", FORMS)
def test_a_table_is_read_in_the_form_it_is_written_in_or_refused(tmp_path, written):
    """Read in any other form it is the same or an error, and never another table."""
    frame = pd.DataFrame(
        {"age": [i + 0.5 for i in range(30)], "town": ["Köln", "Ulm", "Bonn"] * 10, "n": range(30, 60)}
    )
    frame["y"] = ["ja", "nein"] * 15
    sep = {"tab": "\t", "\\t": "\t", "semicolon": ";"}.get(written.get("sep", ","), written.get("sep", ","))
    frame.to_csv(
        tmp_path / "x.csv", sep=sep, decimal=written.get("decimal", "."), encoding=written.get("encoding"), index=False
    )
    read = csv(str(tmp_path / "x.csv"), target="y", **written)
    assert (read.class_names, read.train.x.shape) == (("ja", "nein"), (24, 5))
    assert by_age(read) == {
        i: ([i + 30, *(float(town == t) for t in ("Bonn", "Köln", "Ulm"))], i % 2) for i, town in enumerate(frame.town)
    }
    for other in FORMS:
        try:
            found = csv(str(tmp_path / "x.csv"), target="y", **other)
        except ValueError:
            continue
        np.testing.assert_array_equal(np.sort(found.train.x.sum(0)), np.sort(read.train.x.sum(0)))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (lambda i: f"2024-{i % 12 + 1:02}-{i % 28 + 1:02}", r"84 texts in 320 rows, as '2024-01-01'"),
        (lambda i: f"patient {i}", r"320 texts in 320 rows, as 'patient 0'"),
        (lambda i: f"city {i % 101}", r"101 texts in 320 rows"),
        (lambda i: f"{i:05}", r"320 texts in 320 rows, as '00000'"),
        (lambda i: f'"{i},5"', r"numbers and '0,5': .*data\.decimal"),
        (lambda i: f'"1,{i:03}"', r"numbers and '1,000'"),
        (lambda i: f"{i % 7} %", r"numbers and '0 %'"),
        (lambda i: f"€{i % 7}", r"numbers and '€0'"),
        (lambda i: f"1.{i:03}.000" if i else 7, r"numbers and '1\.001\.000'"),
    ],
)
def test_texts_that_are_no_categories_are_refused(tmp_path, cell, words):
    path = write(tmp_path / "x.csv", [(i // 2, cell(i), "ab"[i % 2]) for i in range(320)], "age,text,y")
    with pytest.raises(
        ValueError, match=rf"^column text (has|holds) {words}.*data\.ignore=\[text\].*data\.categorical=\[text\]"
    ):
        csv(path, target="y")
    with pytest.raises(ValueError, match=r"^column text .*data\.categorical=\[text\] if all are classes"):
        csv(path, target="text", ignore=["y"])
    assert csv(path, target="y", ignore=["text"]).train.x.shape[1] == 1
    assert csv(path, target="y", categorical=["text"]).train.x.shape[1] > 7
    assert csv(path, target="text", ignore=["y"], categorical=["text"]).num_classes >= 7


def test_what_may_not_be_meant_is_told(tmp_path, caplog):
    rows = [(i, "ab"[i % 2], i % 5, "") for i in range(40)]
    dataset = csv(write(tmp_path / "x.csv", rows, "id,y,age,"), target="y")  # a comma ends each line
    assert dataset.train.x.shape[1] == 2
    assert "column id counts the rows: leave it out, data.ignore=[id]" in caplog.text
    assert "column age" not in caplog.text
    caplog.clear()
    csv(
        write(tmp_path / "x.csv", [(("Male", "male ", "F")[i % 3], "ab"[i % 2]) for i in range(40)], "sex,y"),
        target="y",
    )
    assert "column sex has values that differ in upper and lower case alone" in caplog.text
    with pytest.raises(ValueError, match=r"Expected 2 fields in line 2, saw 3.*the first line"):
        csv(write(tmp_path / "x.csv", [(i, i % 2, 7) for i in range(40)], "age,y"), target="y")


def test_empty_cells_are_refused_or_are_the_mean_of_the_training_rows(tmp_path):
    rows = [list(row) for row in ROWS]
    rows[3][4], rows[4][1] = "", ""
    for name, part in (("train", rows[:16]), ("test", rows[16:])):
        write(tmp_path / "t" / f"{name}.csv", part)
    for column, others in (("rate", ["work"]), ("work", ["rate"])):
        with pytest.raises(
            ValueError, match=rf"^column {column} has 1 empty cells \(or NA, .* of 20: .*data\.ignore=\[{column}\], or"
        ):
            csv(str(tmp_path / "t"), target="paid", ignore=others)
    filled = by_age(csv(str(tmp_path / "t"), target="paid", missing="mean"))
    known = [row[4] for row in rows[:16] if row[4] != ""]
    assert filled[23][0] == [3, np.mean(known), 1, 0, 0]
    assert filled[24][0] == [0, 2, 0, 0, 0]
    assert filled[25][0] == [1, 2.5, 0, 0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": None}, r"^data\.target=null is no column; there are age, work, code, paid, rate\.$"),
        ({"target": "pay"}, r"^data\.target=pay is no column"),
        ({"ignore": ["x"]}, r"^data\.ignore=x is no column"),
        ({"categorical": ["x"]}, r"^data\.categorical=x is no column"),
        ({"groups": "site"}, r"^partition\.by=site is no column"),
        ({"ignore": ["age", "work", "code", "rate"]}, r"^ignore=.* leaves no column to learn from"),
        ({"target": "rate"}, r"^data\.target=rate holds numbers with fractions: data\.regression=true"),
        ({"regression": True}, r"^data\.target=paid holds 'no', .* see data\.decimal"),
        ({"missing": "zero"}, r"^missing=zero: "),
        ({"sep": ";;"}, r"^sep=;; must be semicolon, tab or one character"),
        ({"sep": ",", "decimal": ","}, r"^sep=, must be .*, and not data\.decimal"),
        ({"decimal": ";"}, r"^decimal=;: "),
        ({"encoding": "utf-7000"}, r"unknown encoding: utf-7000: see .*data\.encoding"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        csv(write(tmp_path / "x.csv"), **{"target": "paid"} | options)


def test_files_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path=null is no CSV file, .* as in data\.path=people\.csv"):
        csv(None, target="paid")
    write(tmp_path / "s" / "a.csv")
    write(tmp_path / "s" / "b.csv", head="age,job,code,paid,rate")
    with pytest.raises(ValueError, match=r"b\.csv .* has no row, or other columns than .*a\.csv: age, job, code"):
        csv(str(tmp_path / "s"), target="paid")
    for content in (b"", b"a,b\n1,2,3\n4\n1,2,3,4\n", b"\xff\xfe,b\n1,2\n"):
        (tmp_path / "s" / "a.csv").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.csv cannot be read as a CSV file"):
            csv(str(tmp_path / "s" / "a.csv"), target="b")
    (tmp_path / "s" / "a.csv").write_text("a;b\n1.5;2\n2.5;3\n")
    with pytest.raises(ValueError, match=r"a\.csv .* has one column, 'a;b': see data\.sep=semicolon"):
        csv(str(tmp_path / "s" / "a.csv"), target="b")
    (tmp_path / "s" / "a.csv").write_text("5.1,3.5,setosa\n4.9,3.0,setosa\n")
    with pytest.raises(ValueError, match=r"there are 5\.1, 3\.5, setosa"):
        csv(str(tmp_path / "s" / "a.csv"), target="kind")


def test_a_run_on_a_table_in_any_units(config, tmp_path):
    """Raw units: targets of 100,000 ± 50,000 make the loss NaN where nothing standardises them."""
    rng = np.random.default_rng(0)
    income, town = rng.normal(4e4, 1e4, 300), rng.choice(["north", "south"], 300)
    price = 1e5 + 4 * (income - 4e4) + 3e4 * (town == "north")
    pd.DataFrame({"income": income, "town": town, "price": price}).to_csv(tmp_path / "houses.csv", index=False)
    mine = (
        "data=csv", f"data.path={tmp_path}/houses.csv", "data.target=price", "data.regression=true", "rounds=8",
        "participation.num_clients=5", "partition=iid", "model.hidden=[16]", "client.epochs=3",
    )  # fmt: skip
    result = train(config(*mine, folder=tmp_path / "scaled"))
    data = result.trainer.datamodule
    assert data._tests[0][1].std() == pytest.approx(1, abs=0.3)
    assert result.metrics["test/loss"] < 0.3
    y, std = data.dataset.train.y, data.scaling["y_std"]
    np.testing.assert_allclose(std, y.std(0), rtol=1e-6)
    with np.load(tmp_path / "scaled" / "scaling.npz") as scaling:
        assert {name: array.tolist() for name, array in scaling.items()} == {
            name: array.tolist() for name, array in data.scaling.items()
        }
    assert result.module.task.scale.tolist() == pytest.approx(std.tolist())
    raw = train(config(*mine, "data.standardize=false", "rounds=1", folder=tmp_path / "raw"))
    assert not raw.metrics["test/loss"] < 1e6
