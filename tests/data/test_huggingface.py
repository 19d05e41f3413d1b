"""Data sets of ``datasets``, written to a folder and read back. The tests do not use the hub."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

from gcfed.data.sets.huggingface import huggingface
from gcfed.data.sets.leaf import ALPHABET, PAD
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


STRING, CLASS = datasets.Value("string"), datasets.ClassLabel(names=["cat", "dog"])


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
    assert (dataset.name, dataset.num_classes, dataset.class_names) == ("mine", 2, ("cat", "dog"))
    assert (dataset.train.x.shape, dataset.test.x.shape) == ((N, 3, 4, 5), (4, 3, 4, 5))
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
    grey, colours = pictures(4, mode="L"), pictures()
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
    columns, features = {"text": TEXTS, "kind": CLASSES}, {"text": STRING, "kind": CLASS}
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
        ValueError, match=r"^data has \d+, and model\.vocabulary=9 allows tokens from -1 to 8\.$"
    ):
        train(config(*mine, *small, "model.vocabulary=9"))
    result = train(config(*mine, *small))
    net = result.module.net
    assert (net.last_only, net.embedding.num_embeddings) == (True, 256)
    assert net.fc.out_features == result.trainer.datamodule.num_classes == 2
