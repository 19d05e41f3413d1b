"""LEAF's files as its preprocessing leaves them, written small, and read back."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gcfed.data.base import FederatedDataset
from gcfed.data.sets.images import decode
from gcfed.data.sets.leaf import ALPHABET, FACE, PAD, celeba, femnist, shakespeare

RNG = np.random.default_rng(0)


def write(folder: Path, name: str, files: dict[str, dict[str, tuple[list, list]]]) -> None:
    """``{"train/all_0": {user: (x, y)}}`` in LEAF's layout."""
    for file, users in files.items():
        path = folder / name / "data" / f"{file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        path.write_text(json.dumps(content))


def grey(n: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, 784))


@pytest.fixture
def writers(tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    """(folder, {part of a writer: grey levels}): writer b is in a later file, and d has nothing."""
    pixels = {"train c": grey(2), "train a": grey(3), "train b": grey(1), "test a": grey(1), "test c": grey(2)}

    def user(part: str, *labels: int) -> tuple[list, list]:
        return (pixels[part] / 255).tolist(), list(labels)

    files = {
        "train/all_0": {"c": user("train c", 3, 61), "a": user("train a", 0, 10, 36)},
        "train/all_1": {"b": user("train b", 9), "d": ([], [])},
        "test/all_0": {"c": user("test c", 3, 2), "a": user("test a", 1)},
    }
    write(tmp_path, "femnist", files)
    return tmp_path, pixels


def check_writers(dataset: FederatedDataset, pixels: dict[str, np.ndarray]) -> None:
    assert (dataset.num_classes, dataset.class_names[10], dataset.class_names[36]) == (62, "A", "a")
    assert dataset.train.y.tolist() == [3, 61, 0, 10, 36, 9]
    assert dataset.train.groups.tolist() == [2, 2, 0, 0, 0, 1]  # in the order of the names
    assert dataset.test.groups.tolist() == [2, 2, 0]
    expected = np.concatenate([pixels["train c"], pixels["train a"], pixels["train b"]]).reshape(-1, 1, 28, 28)
    np.testing.assert_array_equal(dataset.train.x, expected)
    np.testing.assert_array_equal(dataset.test.x[2].ravel(), pixels["test a"][0])


def test_femnist(writers):
    folder, pixels = writers
    check_writers(femnist(str(folder)), pixels)
    shutil.rmtree(folder / "femnist")
    check_writers(femnist(str(folder)), pixels)  # from the cache


def test_celeba(tmp_path):
    from PIL import Image

    raw = tmp_path / "celeba" / "data" / "raw" / "img_align_celeba"
    raw.mkdir(parents=True)
    for i in range(4):
        Image.new("L" if i == 3 else "RGB", (178, 218), i * 60 if i == 3 else (i * 60, 0, 255)).save(raw / f"{i}.jpg")
    Image.effect_noise((178, 218), 90).convert("RGB").save(raw / "2.jpg")
    files = {
        "train/all": {"20": (["0.jpg", "2.jpg"], [0.0, 1.0]), "3": (["1.jpg"], [1.0])},
        "test/all": {"3": (["3.jpg"], [0])},
    }
    write(tmp_path, "celeba", files)
    dataset = celeba(str(tmp_path))
    assert dataset.train.x.shape == (3, 3, 84, 84)
    assert (dataset.train.y.tolist(), dataset.test.y.tolist()) == ([0, 1, 1], [0])
    assert dataset.train.groups.tolist() == [0, 0, 1]
    np.testing.assert_allclose(dataset.train.x[::2].mean((2, 3)), [[0, 0, 255], [60, 0, 255]], atol=3)
    (bilinear,) = decode([raw / "2.jpg"], "as other sets have it", size=FACE)
    for x, kind in ((dataset.train.x[1], "BICUBIC"), (bilinear[0], "BILINEAR")):
        with Image.open(raw / "2.jpg") as image:
            resized = image.resize((84, 84), Image.Resampling[kind])
        np.testing.assert_array_equal(x, np.asarray(resized).transpose(2, 0, 1))
    np.testing.assert_allclose(dataset.test.x.mean((2, 3)), [[180, 180, 180]], atol=3)

    (raw / "1.jpg").unlink()
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"img_align_celeba/1\.jpg is no readable image"):
        celeba(str(tmp_path))


def test_shakespeare(tmp_path):
    text = "".join(RNG.choice(list(ALPHABET), 90))
    windows = [text[i : i + 80] for i in range(3)]
    odd = "é" + text[1:80]
    train = {"HAMLET": (windows, [text[80], text[81], "$"]), "GHOST": ([odd], ["}"])}
    write(tmp_path, "shakespeare", {"train/all": train, "test/all": {"HAMLET": ([text[:80]], ["\n"])}})
    dataset = shakespeare(str(tmp_path))
    assert (dataset.num_classes, dataset.train.x.shape, dataset.train.y.shape) == (80, (3, 80), (3,))
    decoded = ["".join((*ALPHABET, "é")[token] for token in x) for x in dataset.train.x]
    assert decoded == [*windows[:2], odd]  # the third has no label in the alphabet
    assert PAD in dataset.train.x[2]
    assert [ALPHABET[y] for y in dataset.train.y] == [text[80], text[81], "}"]
    assert dataset.train.groups.tolist() == [1, 1, 0]


def test_what_is_not_there_is_explained(tmp_path):
    command = r"preprocess\.sh -s niid --sf 1\.0 -k 0 -t sample in its folder data/femnist"
    words = rf"no JSON file in .*data/train.*TalwalkarLab/leaf.*{command}.*DATA_DIR"
    with pytest.raises(FileNotFoundError, match=words):
        femnist(str(tmp_path))


GOOD = [0.0] * 784


@pytest.mark.parametrize(
    ("load", "x", "y", "words"),
    [
        (femnist, [GOOD, GOOD[1:]], [1, 2], "inhomogeneous"),
        (femnist, [GOOD], ["x"], "invalid literal"),
        (shakespeare, ["x" * 81, "y" * 80], ["a", "b"], "cannot reshape"),
    ],
)
def test_broken_files_are_named(tmp_path, load, x, y, words):
    write(tmp_path, load.__name__, {"train/all_0": {"a": (x, y)}, "test/all_0": {}})
    with pytest.raises(ValueError, match=rf"all_0\.json is not what LEAF's .*{words}.*: make it again"):
        load(str(tmp_path))
    (tmp_path / load.__name__ / "data" / "train" / "all_0.json").write_text('{"users": ["a"], "user_data": {}}')
    with pytest.raises(ValueError, match=r"all_0\.json is not what LEAF's preprocessing writes"):
        load(str(tmp_path))
