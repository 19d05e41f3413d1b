"""Data sets of ``datasets``, written to a folder and read back. The tests do not use the hub."""

import io
import json
import sys

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from gcfed.data.sets.huggingface import huggingface
from gcfed.data.sets.text import ALPHABET, PAD
from gcfed.run import train

datasets = pytest.importorskip("datasets")
N = 20
CLASSES = [i % 2 for i in range(N)]
WRITERS = [f"writer {i % 5}" for i in range(N)]
TEXTS = [("to be or not" * (1 + i % 3))[: 8 + i] for i in range(N)]


def png(size=(5, 4), mode="RGB", level=0) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, (level, 0, 9) if mode == "RGB" else level).save(buffer, "PNG")
    return buffer.getvalue()


def saved(folder, splits):
    """Saves ``{"train": ({column: values}, {column: feature})}`` with ``save_to_disk``; returns the
    folder.
    """
    made = {
        split: datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        for split, (columns, features) in splits.items()
    }
    (datasets.DatasetDict(made) if set(made) != {""} else made[""]).save_to_disk(folder / "mine")
    return str(folder / "mine")


STRING = datasets.Value("string")
CLASS = datasets.ClassLabel(names=["cat", "dog"])


def pictures(n=N, **png_options):
    columns = {
        "image": [{"bytes": png(level=10 * i, **png_options), "path": None} for i in range(n)],
        "kind": CLASSES[:n],
        "writer_id": WRITERS[:n],
    }
    return columns, {"image": datasets.Image(), "kind": CLASS, "writer_id": STRING}


def test_the_columns_of_images_are_found(tmp_path):
    name = saved(tmp_path, {"train": pictures(), "test": pictures(4)})
    dataset = huggingface(name, str(tmp_path / "data"), groups="writer_id")
    assert dataset.name == "mine"
    assert dataset.num_classes == 2
    assert dataset.class_names == ("cat", "dog")
    assert dataset.train.x.shape == (N, 3, 4, 5)
    assert dataset.test.x.shape == (4, 3, 4, 5)
    np.testing.assert_array_equal(dataset.train.x[:, 0, 0, 0], [10 * i for i in range(N)])
    np.testing.assert_array_equal(dataset.train.y, CLASSES)
    np.testing.assert_array_equal(dataset.train.groups, np.arange(N) % 5)
    assert huggingface(name, str(tmp_path / "data"), size=8).train.x.shape == (N, 3, 8, 8)
    columns, features = pictures(4)
    splits = {
        "train": pictures(),
        "test": (columns | {"kind": [-1] * 4}, features),
        "validation": pictures(6),
    }
    # test: no labels
    assert len(huggingface(saved(tmp_path / "b", splits), str(tmp_path / "data")).test) == 6


def test_the_numbers_of_classes_mean_the_same_in_both_splits(tmp_path):
    def read(labels, *kinds):
        columns, features = pictures(4)
        made = [(columns | {"kind": labels}, features | {"kind": kind}) for kind in kinds]
        name = saved(tmp_path / str(labels), dict(zip(("train", "test"), made, strict=True)))
        return huggingface(name, str(tmp_path / "data"), label="kind")

    assert len(read([-1, 1, 1, -1], *[datasets.Value("int64")] * 2).test) == 4
    with pytest.raises(ValueError, match=r"^data\.label=kind has other classes in the test split"):
        read([0, 1, 1, 0], CLASS, datasets.ClassLabel(names=["dog", "cat"]))
    with pytest.raises(ValueError, match=r"^data\.label=kind is -1, no class, in 1 of 4 samples"):
        read([0, 1, 1, -1], CLASS, CLASS)


def test_images_of_one_set_have_the_same_channels(tmp_path):
    grey = pictures(4, mode="L")
    colours = pictures()
    name = saved(tmp_path / "a", {"train": colours, "test": grey})
    assert huggingface(name, str(tmp_path / "data")).test.x.shape == (4, 3, 4, 5)
    mixed = {**colours[0], "image": [grey[0]["image"][0], *colours[0]["image"][1:]]}
    with pytest.raises(
        ValueError, match=r"row 1 .*it has colours, or is transparent, and the first one is grey"
    ):
        huggingface(saved(tmp_path / "b", {"train": (mixed, colours[1])}), str(tmp_path / "data"))


def test_texts_with_classes(tmp_path):
    columns = {"sentence": TEXTS, "kind": CLASSES}
    name = saved(tmp_path, {"": (columns, {"sentence": STRING, "kind": CLASS})})
    dataset = huggingface(name, str(tmp_path / "data"), length=10)
    assert dataset.train.x.shape == (16, 10)
    read = {
        "".join((*ALPHABET, "_")[t] for t in x)
        for split in (dataset.train, dataset.test)
        for x in split.x
    }
    # padded on the left: a network uses the last position
    assert read == {text[:10].rjust(10, "_") for text in TEXTS}
    assert len(ALPHABET) == PAD


def test_one_of_two_columns_of_classes_must_be_named(tmp_path):
    columns = {"text": TEXTS, "coarse": CLASSES, "fine": CLASSES}
    name = saved(tmp_path, {"": (columns, {"text": STRING, "coarse": CLASS, "fine": CLASS})})
    with pytest.raises(
        ValueError, match=r"data\.label=null: name the column of the classes, one of coarse, fine"
    ):
        huggingface(name, str(tmp_path / "data"), length=10)
    assert huggingface(name, str(tmp_path / "data"), length=10, label="fine").num_classes == 2


def test_unreadable_images_and_a_missing_package_are_named(tmp_path, monkeypatch):
    columns, features = pictures()
    columns["image"][7] = {"bytes": png(size=(9, 9)), "path": None}
    with pytest.raises(
        ValueError, match=r"of row 7 is 9×9, data\.input=image of row 0 is 5×4: give all one size"
    ):
        huggingface(saved(tmp_path / "a", {"": (columns, features)}), str(tmp_path / "data"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"data=huggingface needs a package: .*\[huggingface\]"):
        huggingface("somebody/something", str(tmp_path))


def test_the_lstm_reads_texts_of_any_tokens(tmp_path, config):
    columns = {"text": TEXTS, "kind": CLASSES}
    features = {"text": STRING, "kind": CLASS}
    small = (
        "rounds=1",
        "participation.num_clients=5",
        "partition=iid",
        "model.hidden=4",
        "client.epochs=1",
    )
    name = saved(tmp_path, {"": (columns, features)})
    mine = (
        "data=huggingface",
        f"data.name={name}",
        "data.length=10",
        "model=lstm",
        f"paths.data_dir={tmp_path}",
    )
    with pytest.raises(
        ValueError, match=r" has the token \d+, and CharLSTM knows the tokens 0 to 8: raise model\."
    ):
        train(config(*mine, *small, "model.vocabulary=9"))
    result = train(config(*mine, *small))
    net = result.module.net
    assert net.last_only
    assert net.embedding.num_embeddings == 256
    assert net.fc.out_features == result.trainer.datamodule.num_classes == 2


def with_paths(folder, *paths):
    """A data set of ``save_to_disk`` whose first images are paths instead of bytes.

    ``save_to_disk`` would read them, so the paths are written as texts of the same type.
    """
    columns, _ = pictures()
    for row, path in enumerate(paths):
        columns["image"][row] = {"bytes": None, "path": str(path)}
    encoded = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    name = saved(folder, {"": (columns, {"image": encoded, "kind": CLASS, "writer_id": STRING})})
    about = folder / "mine" / "dataset_info.json"
    info = json.loads(about.read_text())
    info["features"]["image"] = {"_type": "Image"}
    about.write_text(json.dumps(info))
    (arrow,) = folder.glob("mine/*.arrow")
    table = datasets.Dataset.from_file(str(arrow)).data.table
    schema = table.schema.remove_metadata()
    with pa.OSFile(str(folder / "new"), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(table.replace_schema_metadata())
    (folder / "new").replace(arrow)
    return name


def test_images_outside_the_folder_are_refused(tmp_path):
    """Also if the path only looks as if it were inside. No address is opened."""
    outside = tmp_path / "private.png"
    outside.write_bytes(png())
    (tmp_path / "a").mkdir()
    places = [outside, "/etc/passwd", "http://localhost:9/x.png", "https://somebody/x.png"]
    places += ["file:///etc/passwd", "zip://x.png::http://localhost:9/x.zip", "private.png"]
    places += [tmp_path / "6" / "mine" / ".." / ".." / "private.png", "hf://datasets/a/b/x.png"]
    for number, place in enumerate(places):
        name = with_paths(tmp_path / str(number), place)
        with pytest.raises(ValueError, match=r"data\.input=image of row 0.* is not in /"):
            huggingface(name, str(tmp_path / "data"))


def test_images_inside_the_folder_are_read(tmp_path):
    inside = tmp_path / "mine" / "x.png"
    name = with_paths(tmp_path, inside)
    inside.write_bytes(png(level=200))
    dataset = huggingface(name, str(tmp_path / "data"), test=0.1)
    assert 200 in dataset.train.x[:, 0, 0, 0] or 200 in dataset.test.x[:, 0, 0, 0]
    inside.unlink()
    inside.symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"of row 0.* is not in /"):
        huggingface(name, str(tmp_path / "other"))


def test_an_image_of_a_format_that_starts_a_program_is_refused(tmp_path, monkeypatch):
    started = []

    def ghostscript(*arguments, **options):
        started.append(arguments)
        return Image.new("RGB", (5, 4)).im

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", ghostscript)
    columns, features = pictures()
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n%%EndComments\nshowpage\n"
    columns["image"][3] = {"bytes": script, "path": None}
    with pytest.raises(ValueError, match=r"row 3 is no readable image"):
        huggingface(saved(tmp_path, {"": (columns, features)}), str(tmp_path / "data"))
    assert not started


def test_the_mode_of_an_image_column_counts(tmp_path):
    columns, features = pictures()
    grey = features | {"image": datasets.Image(mode="L")}
    name = saved(tmp_path, {"": (columns, grey)})
    assert huggingface(name, str(tmp_path / "data")).train.x.shape[1] == 1


def test_a_table_outside_the_folder_is_refused(tmp_path):
    """A folder's state.json names its files."""
    other = saved(tmp_path / "other", {"": pictures()})
    name = saved(tmp_path / "evil", {"": pictures()})
    state = json.loads((tmp_path / "evil/mine/state.json").read_text())
    (file,) = state["_data_files"]
    file["filename"] = f"{other}/{file['filename']}"
    (tmp_path / "evil/mine/state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"data\.name=.*other.* is not in /"):
        huggingface(name, str(tmp_path / "data"))
