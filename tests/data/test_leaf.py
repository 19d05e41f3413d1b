"""The data sets of LEAF, read from small files in the format of its preprocessing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gcfed.data.sets.leaf import celeba, femnist, shakespeare
from gcfed.data.sets.text import ALPHABET, PAD

RNG = np.random.default_rng(0)


def write(
    folder: Path,
    name: str,
    files: dict[str, dict[str, tuple[list, list]]],
    listed: list[str] | None = None,
) -> None:
    """Writes ``{"train/all_0": {user: (x, y)}}`` in LEAF's layout.

    Each file lists its users, or these.
    """
    for file, users in files.items():
        path = folder / name / "data" / f"{file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "users": listed or list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        path.write_text(json.dumps(content))


def grey(n: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, 784))


def test_femnist(tmp_path):
    """Writer b is in a second file, and d has no samples."""
    pixels = {
        "train c": grey(2),
        "train a": grey(3),
        "train b": grey(1),
        "test a": grey(1),
        "test c": grey(2),
    }

    def user(part: str, *labels: int) -> tuple[list, list]:
        return (pixels[part] / 255).tolist(), list(labels)

    files = {
        "train/all_0": {"c": user("train c", 3, 61), "a": user("train a", 0, 10, 36)},
        "train/all_1": {"b": user("train b", 9), "d": ([], [])},
        "test/all_0": {"c": user("test c", 3, 2), "a": user("test a", 1)},
    }
    write(tmp_path, "femnist", files)
    for _ in range(2):
        dataset = femnist(str(tmp_path))
        assert dataset.num_classes == 62
        assert dataset.class_names[10] == "A"
        assert dataset.class_names[36] == "a"
        assert dataset.train.y.tolist() == [3, 61, 0, 10, 36, 9]
        # numbered in the order of their names
        assert dataset.train.groups.tolist() == [2, 2, 0, 0, 0, 1]
        assert dataset.test.groups.tolist() == [2, 2, 0]
        expected = np.concatenate(
            [pixels["train c"], pixels["train a"], pixels["train b"]]
        ).reshape(-1, 1, 28, 28)
        np.testing.assert_array_equal(dataset.train.x, expected)
        np.testing.assert_array_equal(dataset.test.x[2].ravel(), pixels["test a"][0])
        shutil.rmtree(tmp_path / "femnist", ignore_errors=True)  # then the cache is read


def test_celeba(tmp_path):
    from PIL import Image

    raw = tmp_path / "celeba" / "data" / "raw" / "img_align_celeba"
    raw.mkdir(parents=True)
    for i in range(4):
        Image.new(
            "L" if i == 3 else "RGB", (178, 218), i * 60 if i == 3 else (i * 60, 0, 255)
        ).save(raw / f"{i}.jpg")
    Image.effect_noise((178, 218), 90).convert("RGB").save(raw / "2.jpg")
    files = {
        "train/all": {"20": (["0.jpg", "2.jpg"], [0.0, 1.0]), "3": (["1.jpg"], [1.0])},
        "test/all": {"3": (["3.jpg"], [0])},
    }
    write(tmp_path, "celeba", files)
    dataset = celeba(str(tmp_path))
    assert dataset.train.x.shape == (3, 3, 84, 84)
    assert dataset.train.y.tolist() == [0, 1, 1]
    assert dataset.test.y.tolist() == [0]
    assert dataset.train.groups.tolist() == [0, 0, 1]
    np.testing.assert_allclose(
        dataset.train.x[::2].mean((2, 3)), [[0, 0, 255], [60, 0, 255]], atol=3
    )
    with Image.open(raw / "2.jpg") as image:
        resized = image.resize((84, 84), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(dataset.train.x[1], np.asarray(resized).transpose(2, 0, 1))
    np.testing.assert_allclose(dataset.test.x.mean((2, 3)), [[180, 180, 180]], atol=3)


def test_shakespeare(tmp_path):
    text = "".join(RNG.choice(list(ALPHABET), 90))
    windows = [text[i : i + 80] for i in range(3)]
    odd = "é" + text[1:80]
    train = {"HAMLET": (windows, [text[80], text[81], "$"]), "GHOST": ([odd], ["}"])}
    write(
        tmp_path, "shakespeare", {"train/all": train, "test/all": {"HAMLET": ([text[:80]], ["\n"])}}
    )
    dataset = shakespeare(str(tmp_path))
    assert dataset.num_classes == 80
    assert dataset.train.x.shape == (3, 80)
    assert dataset.train.y.shape == (3,)
    decoded = ["".join((*ALPHABET, "é")[token] for token in x) for x in dataset.train.x]
    # the third window is left out: its label is not in the alphabet
    assert decoded == [*windows[:2], odd]
    assert PAD in dataset.train.x[2]
    assert [ALPHABET[y] for y in dataset.train.y] == [text[80], text[81], "}"]
    assert dataset.train.groups.tolist() == [1, 1, 0]


def test_a_missing_folder_is_explained(tmp_path):
    command = r"preprocess\.sh -s niid --sf 1\.0 -k 0 -t sample in its folder data/femnist"
    words = rf"no JSON file in .*data/train.*TalwalkarLab/leaf.*{command}.*DATA_DIR"
    with pytest.raises(FileNotFoundError, match=words):
        femnist(str(tmp_path))
