"""Properties of all readers: texts that differ are different classes and clients, and each entry
and each row is read or counted in the log.
"""

import gzip
import io
import os
import re
import shutil
import unicodedata
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_leaf import write as write_leaf

from gcfed.data.sets.cache import SplitWriter
from gcfed.data.sets.datasets import hwdigits
from gcfed.data.sets.huggingface import huggingface
from gcfed.data.sets.images import image_folder
from gcfed.data.sets.leaf import femnist, shakespeare
from gcfed.data.sets.own import arrays, from_arrays
from gcfed.data.sets.table import csv
from gcfed.data.sets.text import LENGTH

PER_NAME = 5  # samples


def cleaned(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


# ------------------------------------------------------------------------------------------- names
def digits(rng, length) -> str:
    return "".join(rng.choice([*"0123456789"], length))


def long_numbers(rng):
    start = digits(rng, 18)
    return [f"8{start}{i}" for i in range(9)]


def numbers_beyond_64_bits(rng):
    start = digits(rng, 20)
    return [f"9{start}{i:02}" for i in range(9)]


def signs_and_zeros(rng):
    number = str(rng.integers(1, 10**6))
    return [number, f"+{number}", f"-{number}", f"0{number}", f"00{number}", f"{number}.0"]


def accents_in_two_forms(rng):
    words = ["café", "Ünal", "señor", "Ångström"]
    return words + [unicodedata.normalize("NFD", word) for word in words]


def spaces_and_case(rng):
    word = "".join(rng.choice([*"abcdefg"], 6))
    return [
        word,
        f" {word}",
        f"{word}  ",
        word.upper(),
        word.capitalize(),
        f"{word[:3]} {word[3:]}",
    ]


def whole_numbers(rng):
    return [str(number) for number in rng.choice(10**6, 9, replace=False)]


KINDS = [
    long_numbers,
    numbers_beyond_64_bits,
    signs_and_zeros,
    accents_in_two_forms,
    spaces_and_case,
    whole_numbers,
]


def rows_of(names):
    return [(i, name) for i, name in enumerate(names * PER_NAME)]


def first_numbers(split):
    """The first number of each sample, which tells it from all others."""
    return split.x.reshape(len(split.x), -1)[:, 0]


def classes_in(dataset):
    """The number of classes, and the sample and the class of each row."""
    return dataset.num_classes, first_numbers(dataset.train), dataset.train.y


def clients_in(dataset):
    """The number of clients, and the sample and the client of each row."""
    groups = dataset.train.groups
    return len(np.unique(groups)), first_numbers(dataset.train), groups


def read_csv(folder, names, **options):
    """Reads a table in two files. The first name has a file of its own, whose column may look like
    one of another type.
    """
    (folder / "x").mkdir()
    for file, has_first in (("a", True), ("b", False)):
        rows = [
            f"{i},{name},{i % 2}" for i, name in rows_of(names) if (name == names[0]) == has_first
        ]
        (folder / "x" / f"{file}.csv").write_text("\n".join(["n,name,y", *rows]) + "\n", "utf-8")
    return csv(str(folder / "x"), **options)


def as_csv_target(folder, names):
    return classes_in(read_csv(folder, names, target="name", ignore=["y"]))


def as_csv_clients(folder, names):
    return clients_in(read_csv(folder, names, target="y", groups="name"))


def as_csv_categories(folder, names):
    train = read_csv(folder, names, target="y", categorical=["name"]).train
    return train.x.shape[1] - 1, train.x[:, 0], train.x[:, 1:].argmax(1)


def as_csv_files(folder, names):
    place = folder / "sites"
    place.mkdir()
    for name in {cleaned(name): name for name in names}.values():
        mine = [i for i, other in rows_of(names) if cleaned(other) == cleaned(name)]
        lines = [f"{i},{i % 2}" for i in mine]
        (place / f"{name}.csv").write_text("\n".join(["n,y", *lines]) + "\n")
    return clients_in(csv(str(place), target="y"))


def vectors(names):
    return np.arange(PER_NAME * len(names), dtype=float)[:, None]


def as_array_of_classes(folder, names):
    np.savez(folder / "x.npz", x=vectors(names), y=np.array(names * PER_NAME))
    return classes_in(arrays(str(folder / "x.npz")))


def as_array_of_clients(folder, names):
    y = np.arange(PER_NAME * len(names)) % 2
    np.savez(folder / "x.npz", x=vectors(names), y=y, groups=np.array(names * PER_NAME))
    return clients_in(arrays(str(folder / "x.npz")))


def as_array(make):
    """Classes in an array that ``make`` makes of a list of texts."""

    def read(folder, names):
        content = {"x": vectors(names), "y": make(names * PER_NAME)}
        return classes_in(from_arrays(content, "mine.py", 0.2))

    return read


def save_image(path: Path, number: int, size=(4, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (number, 0, 0)).save(path)


def as_folders_of_classes(folder, names):
    for i, name in rows_of(names):
        save_image(folder / "images" / name / f"{i}.png", i)
    return classes_in(image_folder(str(folder / "images"), str(folder)))


def as_folders_of_clients(folder, names):
    for i, name in rows_of(names):
        for kind in ("cat", "dog"):
            save_image(folder / "images" / name / kind / f"{i}.png", i)
    return clients_in(image_folder(str(folder / "images"), str(folder), clients=True))


def write_users(folder, reader, users, listed=None):
    """Writes users for a reader of LEAF's files, the same to train on and to test."""
    files = {"train/all": users, "test/all": users}
    write_leaf(folder, reader.__name__, files, listed)


def as_leaf_users(folder, names):
    users = {}
    for i, name in rows_of(names):
        x, y = users.setdefault(name, ([], []))
        x.append([i / 255] * 784)
        y.append(i % 2)
    write_users(folder, femnist, users)
    return clients_in(femnist(str(folder)))


def as_hub_columns(key):
    def read(folder, names):
        datasets = pytest.importorskip("datasets")
        texts = names * PER_NAME
        columns = {"text": [chr(48 + i) for i in range(len(texts))], "kind": texts, "who": texts}
        datasets.Dataset.from_dict(columns).save_to_disk(folder / "mine")
        dataset = huggingface(
            str(folder / "mine"), str(folder), input="text", label="kind", groups="who", length=1
        )
        count, *_ = classes_in(dataset) if key == "classes" else clients_in(dataset)
        return count, None, None

    return read


READERS = {
    "csv target": as_csv_target,
    "csv clients": as_csv_clients,
    "csv categories": as_csv_categories,
    "csv files": as_csv_files,
    "array of classes": as_array_of_classes,
    "array of clients": as_array_of_clients,
    "objects": as_array(partial(np.array, dtype=object)),
    "texts of any length": as_array(partial(np.array, dtype=np.dtypes.StringDType())),
    "bytes": as_array(lambda texts: np.char.encode(texts, "utf-8")),
    "folders of classes": as_folders_of_classes,
    "folders of clients": as_folders_of_clients,
    "leaf users": as_leaf_users,
    "hub classes": as_hub_columns("classes"),
    "hub clients": as_hub_columns("clients"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_texts_that_differ_are_different_classes_and_clients(tmp_path, reader, kind):
    names = kind(np.random.default_rng([*reader.encode()]))
    count, sample_n, number_n = READERS[reader](tmp_path, names)
    assert count == len({cleaned(name) for name in names})
    if number_n is None:
        return
    text_of = dict(rows_of(names))
    pairs = {
        (cleaned(text_of[int(sample)]), int(number))
        for sample, number in zip(sample_n, number_n, strict=True)
    }
    assert len(pairs) == len({text for text, _ in pairs}) == len({number for _, number in pairs})


def test_integers_of_any_size_stay_apart():
    x = np.arange(40.0)[:, None]
    for y in (
        np.array([2**63 + 1, 2**63 + 2], np.uint64),
        np.array([2**53, 2**53 + 1, -1]),
        [10**25, 10**25 + 1, -(10**25)],
    ):
        labels = [y[i % len(y)] for i in range(40)]
        content = {"x": x, "y": labels, "groups": labels}
        dataset = from_arrays(content, "mine.py", 0.2)
        assert dataset.num_classes == len(np.unique(dataset.train.groups)) == len(y)
    unsigned = np.array([2**63 + 1, 2**63 + 2] * 20, np.uint64)
    signed = np.array([3, -3] * 20)
    content = {"x": x, "y": unsigned, "x_test": x, "y_test": signed}
    assert from_arrays(content, "mine.py", 0.2).class_names == (
        "-3",
        "3",
        str(2**63 + 1),
        str(2**63 + 2),
    )


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (np.array([1.0, np.nan] * 20), r"groups holds 20 empty entries \(NaN\)"),
        (np.array(["2026-01-01", "NaT"] * 20, "datetime64[D]"), "groups holds 20 empty entries"),
        (np.array(["a", " "] * 20), "an entry of groups is an empty text: fill it"),
        ([None, "a"] * 20, "groups holds objects that are neither all text nor all numbers"),
        ([None] * 40, "groups holds objects that are neither all text nor all numbers"),
    ],
)
def test_clients_without_a_name_are_refused(groups, words):
    content = {"x": np.arange(40.0)[:, None], "y": np.arange(40) % 2, "groups": groups}
    with pytest.raises(ValueError, match=rf"^mine\.npz: {words}"):
        from_arrays(content, "mine.npz", 0.2)


# ---------------------------------------------------------------------------------------- entries
def entries_below(folder: Path) -> int:
    """The number of files, of links and of empty folders."""
    count = 0
    for place, folders, files in os.walk(folder):
        count += len(files) + (not files and not folders)
        count += sum((Path(place) / name).is_symlink() for name in folders)
    return count


def entries_named(caplog) -> int:
    text = "\n".join(caplog.messages)
    return sum(
        int(count) for count in re.findall(r": (\d+) entr(?:y is|ies are) not read \(", text)
    )


def litter(folder: Path) -> None:
    """Entries that no reader takes."""
    for name in ("notes.txt", ".hidden", ".DS_Store", "old.bak", "old/deep/x.md", "a.csv~"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a,b\n1,2\n")
    (folder / "empty/below").mkdir(parents=True)
    (folder / "broken").symlink_to(folder / "nowhere")
    (folder / "circle").symlink_to(folder)


def a_table_per_client(folder):
    place = folder / "sites"
    place.mkdir()
    text = "n,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20))
    for name in ("a.csv", "B.CSV", "test.csv", "validation.csv", "more/c.csv", "._a.csv", "d.txt"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    (place / "z.csv.gz").write_bytes(gzip.compress(text.encode()))
    litter(place)
    dataset = csv(str(place), target="y")
    assert len(dataset.train) == 60
    assert len(dataset.test) == 20
    return place, 4


def images_of_classes(folder):
    place = folder / "images"
    for part in ("Train", "test", "validation"):
        for kind in ("cat", "dog"):
            save_image(place / part / kind / "more" / "1.png", 1)
        save_image(place / part / "loose.png", 1)
        litter(place / part)
    litter(place)
    dataset = image_folder(str(place), str(folder))
    assert len(dataset.train) == len(dataset.test) == 2
    return place, 4


def images_of_clients(folder):
    place = folder / "images"
    for client in ("bob", "zoe"):
        for kind in ("cat", "dog"):
            save_image(place / client / kind / "1.png", 1)
            save_image(place / client / kind / ".2.png", 1)
        save_image(place / client / "loose.png", 1)
    litter(place)
    dataset = image_folder(str(place), str(folder), clients=True)
    assert len(dataset.train) + len(dataset.test) == 4
    return place, 4


def leaf_files(folder):
    as_leaf_users(folder, ["a", "b"])
    place = folder / "femnist/data"
    litter(place / "train")
    (place / "README").write_text("")
    femnist(str(folder))
    return place, 2


def hub_files(folder):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [*"abcdefgh"], "label": [0, 1] * 4})
    splits = datasets.DatasetDict(dict.fromkeys(("train", "test", "validation"), rows))
    splits.save_to_disk(folder / "mine")
    litter(folder / "mine")
    dataset = huggingface(str(folder / "mine"), str(folder), length=1)
    assert len(dataset.train) == 8
    assert len(dataset.test) == 8
    return folder / "mine", 2 + 1 + 3 * 2  # two of three tables, and the descriptions of all


@pytest.mark.parametrize(
    "make",
    [a_table_per_client, images_of_classes, images_of_clients, leaf_files, hub_files],
)
def test_each_entry_of_a_folder_is_read_or_counted(tmp_path, caplog, make):
    place, read = make(tmp_path)
    assert read + entries_named(caplog) == entries_below(place)


# -------------------------------------------------------------------------------------------- rows
def test_users_and_labels_that_leaf_leaves_out_are_counted(tmp_path, caplog):
    text = "a" * LENGTH
    users = {"HAMLET": ([text] * 3, ["a", "$", "b"]), "GHOST": ([text], ["$"]), "NOBODY": ([], [])}
    write_users(tmp_path, shakespeare, users)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        dataset = shakespeare(str(tmp_path))
        assert len(dataset.train) == 2
        assert "train: 2 samples are left out: their label is not in LEAF's" in caplog.text
        assert "test: 1 users have no sample: NOBODY" in caplog.text


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([[2.0] * 784], [1], "a pixel is outside 0 … 1"),
        ([[0.0] * 784] * 2, [1], "user a has not as many samples as labels"),
        ([[0.0] * 784], [0.5], "a label is no whole number"),
        ([[0.0] * 784, [0.0] * 783], [1, 2], "inhomogeneous.*: make it again"),
    ],
)
def test_leaf_files_that_do_not_fit_are_refused(tmp_path, x, y, words):
    write_users(tmp_path, femnist, {"a": (x, y)})
    with pytest.raises(ValueError, match=rf"all\.json is not what LEAF's .*{words}"):
        femnist(str(tmp_path))


@pytest.mark.parametrize(
    ("reader", "user"), [(femnist, ([], [])), (shakespeare, (["a" * LENGTH], ["$"]))]
)
def test_leaf_files_without_a_sample_are_refused(tmp_path, reader, user):
    write_users(tmp_path, reader, {"a": user})
    with pytest.raises(ValueError, match=r"data/train has no user with a sample: make its files"):
        reader(str(tmp_path))


@pytest.mark.parametrize(
    ("listed", "words"),
    [("a", "users does not list b"), ("abc", r"all\.json is not what LEAF's preprocessing writes")],
)
def test_leaf_files_list_the_users_that_they_have(tmp_path, listed, words):
    users = dict.fromkeys("ab", ([[0.5] * 784], [1]))
    write_users(tmp_path, femnist, users, [*listed])
    with pytest.raises(ValueError, match=words):
        femnist(str(tmp_path))


def test_a_label_of_mnist_m_that_is_no_digit_is_named(tmp_path):
    place = tmp_path / "mnist_m"
    for part in ("train", "test"):
        for i in range(2):
            save_image(place / f"mnist_m_{part}" / f"{i}.png", 1, (32, 32))
        (place / f"mnist_m_{part}_labels.txt").write_text("0.png 4\n1.png 7\n")
    hwdigits(str(tmp_path), download=False, sets=["mnist_m"])
    (place / "mnist_m_test_labels.txt").write_text("0.png 4\n1.png seven\n")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"mnist_m_test_labels\.txt has a label 'seven'"):
        hwdigits(str(tmp_path), download=False, sets=["mnist_m"])


def test_folders_and_splits_without_rows_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x.csv").write_text("a,y\n1,2\n")
    rows = datasets.Dataset.from_dict({"text": [*"abcdefgh"], "label": [0, 1] * 4})
    datasets.DatasetDict({"train": rows, "test": rows.select([])}).save_to_disk(tmp_path / "a")
    for name in ("mine", "a"):
        with pytest.raises(ValueError, match=rf"^data\.name=.*{name} is no folder of save_to_disk"):
            huggingface(str(tmp_path / name), str(tmp_path), length=1)


def test_splits_columns_and_texts_of_the_hub_are_counted(tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    caplog.set_level("INFO")
    texts = ["to be", "or", "n", "", "日本", "not to be or not"]
    rows = datasets.Dataset.from_dict({"text": texts, "label": [0, 1] * 3, "page": [*range(6)]})
    splits = {"train": rows, "test": rows, "validation": rows.select(range(4)), "extra": rows}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "mine")
    huggingface(str(tmp_path / "mine"), str(tmp_path), length=5)
    text = caplog.text
    assert "split validation with 4 rows is not read: train and test is used" in text
    assert "split extra with 6 rows is not read" in text
    assert "columns that are not read: page" in text
    assert "train: 2 of 6 texts fill data.length=5 tokens, and are cut if they are longer" in text
    assert "train: 2 of 15 characters are not in LEAF's alphabet" in text
    assert "mine: 2 classes: 0, 1" in text
    caplog.clear()
    dataset = huggingface(str(tmp_path / "mine"), str(tmp_path), length=5, next_token=True)
    assert "train: 2 of 6 texts are not read: they have fewer than two tokens" in caplog.text
    assert len(dataset.train) == 6


def test_classes_of_the_hub_keep_their_names(tmp_path):
    """Also if some of them have no sample."""
    datasets = pytest.importorskip("datasets")
    kind = datasets.ClassLabel(names=["cat", "dog", "emu"])
    features = datasets.Features({"text": datasets.Value("string"), "kind": kind})
    columns = {"text": [*"abcdefgh"], "kind": [0, 2] * 4}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "mine")
    dataset = huggingface(str(tmp_path / "mine"), str(tmp_path), length=1)
    assert dataset.class_names == ("cat", "emu")


def test_a_class_without_a_test_sample_is_named(caplog):
    x = np.arange(6.0)[:, None]
    content = {"x": x, "y": [*"aabbcc"], "x_test": x[:2], "y_test": ["a", "b"]}
    from_arrays(content, "mine.npz", 0.2)
    assert caplog.messages == ["mine.npz: the test split has no sample of 1 classes: c"]


def test_samples_and_labels_of_a_cache_must_match(tmp_path):
    keep = SplitWriter(tmp_path)
    block = np.zeros((3, 1, 4, 4), np.uint8)
    for samples, labels in ((block, 2), (block, 4), ([block, block], 5), ([], 2)):
        with pytest.raises(ValueError, match="the train split"):
            keep(
                "train", iter(samples) if isinstance(samples, list) else samples, np.arange(labels)
            )


def test_broken_images_are_named(tmp_path):
    buffer = io.BytesIO()
    Image.effect_noise((40, 40), 90).save(buffer, "PNG")
    for i, content in enumerate((b"", b"GIF89a", buffer.getvalue()[:300])):
        folder = tmp_path / str(i)
        for kind in ("cat", "dog"):
            save_image(folder / kind / "1.png", 1, (40, 40))
            save_image(folder / kind / "2.png", 1, (40, 40))
        (folder / "cat/broken.png").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"cat/broken\.png is no readable image .*: put a sound"
        ):
            image_folder(str(folder), str(tmp_path))
