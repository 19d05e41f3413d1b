import hashlib
import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA_DIR

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets import vision
from gcfed.data.sets.datasets import digits, synthetic, tiny_imagenet, torchvision_set
from gcfed.data.sets.files import Origin, obtain

RNG = np.random.default_rng(0)
NOWHERE = "http://127.0.0.1:9"  # nobody listens


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def put(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return md5(content)


# what a loader may hand over


def test_splits_and_sets_are_checked():
    x, y = np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 1, 2])
    good = Split(x, y)
    assert len(good) == 3
    for bad in [(x.astype(float), y), (x[:, 0], y), (x, y[:2]), (x, y.astype(np.int32)), (x, y, y[:2])]:
        with pytest.raises(ValueError, match="must be"):
            Split(*bad)
    for bad in [(np.array([[1.0, np.nan]]), np.ones((1, 1))), (np.ones((1, 2)), np.array([[1.0, np.inf]]))]:
        with pytest.raises(ValueError, match="must be finite numbers"):
            Split(*bad)
    with pytest.raises(ValueError, match="train labels 0 … 2 for 2 classes"):
        FederatedDataset("toy", 2, good, good)
    with pytest.raises(ValueError, match="test split is empty"):
        FederatedDataset("toy", 3, good, Split(x[:0], y[:0]))
    with pytest.raises(ValueError, match="2 class names for 3 classes"):
        FederatedDataset("toy", 3, good, good, ("a", "b"))


# digits


def test_digits_are_split_once_and_for_all():
    dataset = digits()
    assert dataset.train.x.shape == (1437, 1, 8, 8)
    assert dataset.test.x.shape == (360, 1, 8, 8)
    assert dataset.train.x.max() == 255
    np.testing.assert_array_equal(digits().train.x, dataset.train.x)
    train, test = np.bincount(dataset.train.y), np.bincount(dataset.test.y)
    np.testing.assert_allclose(test, (train + test) * 360 / 1797, atol=1)
    with np.load(Path(vision.__file__).with_name("digits.npz")) as raw:
        expected = [(*np.round(x.ravel() * 255.0 / 16), y) for x, y in zip(raw["x"], raw["y"], strict=True)]
    got = [(*x.ravel(), y) for split in (dataset.train, dataset.test) for x, y in zip(split.x, split.y, strict=True)]
    assert sorted(map(tuple, np.array(got))) == sorted(map(tuple, np.array(expected)))  # each image once


# synthetic


def nearest_prototype_accuracy(dataset):
    train, test = (split.x.reshape(len(split), -1).astype(np.float32) for split in (dataset.train, dataset.test))
    means = np.stack([train[dataset.train.y == c].mean(0) for c in range(dataset.num_classes)])
    distance = ((test[:, None] - means) ** 2).sum(-1)
    return (distance.argmin(1) == dataset.test.y).mean()


@pytest.mark.parametrize(("num_classes", "shape"), [(3, (3, 17, 5)), (62, (1, 28, 28)), (4, (2, 2, 2))])
def test_synthetic_is_a_task_of_any_shape_that_can_be_learned(num_classes, shape):
    dataset = synthetic(num_classes=num_classes, shape=shape, num_train=2000, num_test=500, noise=20)
    assert dataset.train.x.shape == (2000, *shape)
    assert np.ptp(np.bincount(dataset.train.y, minlength=num_classes)) <= 1
    assert nearest_prototype_accuracy(dataset) > 0.9
    assert not np.array_equal(dataset.train.x[:500], dataset.test.x)


# CIFAR


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """(torchvision class, {part: (x, y)}) of a small CIFAR-10 in the official format under tmp_path."""
    from torchvision.datasets import CIFAR10 as cls

    expected: dict[str, list] = {"train": [], "test": []}
    for part, attribute in (("train", "train_list"), ("test", "test_list")):
        listed = []
        for file, _ in getattr(cls, attribute):
            x, y = RNG.integers(0, 256, (5, 3072), np.uint8), RNG.integers(0, 10, 5)
            batch = pickle.dumps({"data": x, "labels": y.tolist()})
            listed.append([file, put(tmp_path / cls.base_folder / file, batch)])
            expected[part].append((x.reshape(5, 3, 32, 32), y))
        monkeypatch.setattr(cls, attribute, listed)
    names = pickle.dumps({cls.meta["key"]: [f"class {i}" for i in range(10)]})
    meta = put(tmp_path / cls.base_folder / cls.meta["filename"], names)
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": meta})
    monkeypatch.setattr(cls, "url", f"{NOWHERE}/{cls.filename}")
    return cls, {part: [np.concatenate(a) for a in zip(*batches, strict=True)] for part, batches in expected.items()}


def check(dataset, expected, num_classes):
    for part in ("train", "test"):
        split = getattr(dataset, part)
        np.testing.assert_array_equal(split.x, expected[part][0])
        np.testing.assert_array_equal(split.y, expected[part][1])
    assert dataset.num_classes == num_classes


@pytest.mark.parametrize("download", [False, True])
def test_cifar_its_damage_and_its_cache(cifar, tmp_path, download):
    cls, expected = cifar
    first = tmp_path / cls.base_folder / cls.train_list[0][0]
    content = first.read_bytes()
    first.write_bytes(content[:-7])
    words = f"cifar10: a file in {cls.base_folder} is missing or broken .*{tmp_path}.*put {cls.base_folder}"
    with pytest.raises(FileNotFoundError, match=words) as caught:
        torchvision_set("cifar10", str(tmp_path), download=download)
    assert ("data.dataset.download=true" in str(caught.value)) != download
    first.write_bytes(content)
    dataset = torchvision_set("cifar10", str(tmp_path), download=download)
    check(dataset, expected, 10)
    assert dataset.class_names[1] == "class 1"
    for path in (tmp_path / cls.base_folder).iterdir():
        path.unlink()
    check(torchvision_set("cifar10", str(tmp_path), download=False), expected, 10)  # the cache needs no raw files


def test_a_file_is_downloaded_where_it_is_missing_or_damaged(tmp_path, monkeypatch):
    def download_url(url, root, name, md5):
        assert (url, md5) == ("an address", right)
        put(root / name, b"content")

    monkeypatch.setattr("gcfed.data.sets.files.download_url", download_url)
    right, path, origin = md5(b"content"), tmp_path / "x.bin", Origin("toy", tmp_path, "a page")
    for found in (None, b"cut short"):
        if found:
            path.write_bytes(found)
        with pytest.raises(FileNotFoundError, match=r"toy: x\.bin is missing, or its md5 .* put x\.bin from a page"):
            obtain(path, right, "an address", origin, download=False)
        obtain(path, right, "an address", origin, download=True)
        assert path.read_bytes() == b"content"


# the MNIST family


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("name", "raw", "prefixes", "classes"),
    [
        ("fashion_mnist", "FashionMNIST", ("train", "t10k"), 10),
        ("emnist_byclass", "EMNIST", ("emnist-byclass-train", "emnist-byclass-test"), 62),
    ],
)
def test_the_mnist_family_unpacked(tmp_path, name, raw, prefixes, classes):
    expected = {}
    for part, prefix in zip(("train", "test"), prefixes, strict=True):
        x, y = RNG.integers(0, 256, (7, 28, 28), np.uint8), RNG.integers(0, classes, 7)
        put(tmp_path / raw / "raw" / f"{prefix}-images-idx3-ubyte", idx(x))
        put(tmp_path / raw / "raw" / f"{prefix}-labels-idx1-ubyte", idx(y))
        expected[part] = (x[:, None], y)
    check(torchvision_set(name, str(tmp_path), download=False), expected, classes)


# TinyImageNet

WNIDS = ["n03", "n01", "n02"]  # not sorted: the order of the file counts


def jpeg(value: int, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(buffer, "JPEG", quality=100)
    return buffer.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A file that says it is so large; its pixels are not needed."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"]
    whole = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


def tiny(train: int = 2) -> dict[str, bytes]:
    files = {
        "wnids.txt": "\n".join(WNIDS).encode(),
        "words.txt": b"n01\ta cat\nn02\tdog, hound\nn03\tpond\nn99\telse\n",
        "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn03\t0\t0\t9\t9\n",
        "val/images/val_0.JPEG": jpeg(20, "L"),
        "val/images/val_1.JPEG": jpeg(200),
    }
    for c, wnid in enumerate(sorted(WNIDS)):
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"unused"
        files |= {f"train/{wnid}/images/{wnid}_{i}.JPEG": jpeg(50 * c) for i in range(train)}
    return files


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        put(folder / "tiny-imagenet-200" / name, content)


def check_tiny(dataset, train=2):
    assert dataset.class_names == ("pond", "a cat", "dog, hound")
    assert dataset.train.x.shape == (3 * train, 3, 64, 64)
    reds = dataset.train.x[:, 0].mean((1, 2))
    for c, red in enumerate((100, 0, 50)):
        np.testing.assert_allclose(reds[dataset.train.y == c], [red] * train, atol=3)
    np.testing.assert_array_equal(dataset.test.y, [2, 0])
    np.testing.assert_allclose(dataset.test.x.mean((2, 3)), [[20, 20, 20], [200, 0, 0]], atol=3)


def test_tiny_imagenet_grows_with_its_folder(tmp_path):
    write(tmp_path, tiny() | {"train/n01/images/._n01_0.JPEG": b"a Mac's"})
    check_tiny(tiny_imagenet(str(tmp_path), download=False))
    write(tmp_path, tiny(train=4))
    check_tiny(tiny_imagenet(str(tmp_path), download=False), train=4)


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.mkdir("tiny-imagenet-200")
        for name, content in files.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    return buffer.getvalue()


def test_tiny_imagenet_from_its_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "MD5", put(tmp_path / "tiny-imagenet-200.zip", zipped(tiny())))
    check_tiny(tiny_imagenet(str(tmp_path), download=False))
    (tmp_path / "tiny-imagenet-200.zip").unlink()
    check_tiny(tiny_imagenet(str(tmp_path), download=False))  # from the cache


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        ({"words.txt": None}, FileNotFoundError, "words.txt"),
        ({"val/images/val_1.JPEG": None}, ValueError, "val/images/val_1.JPEG is no readable image .*No such file"),
        ({f"train/n02/images/n02_{i}.JPEG": None for i in (0, 1)}, ValueError, "no training image of n02"),
        ({"train/n07/images/n07_0.JPEG": jpeg(1)}, ValueError, "image of n07, or wnids.txt lacks it"),
        ({"train/n02/images/n02_1.JPEG": jpeg(1)[:-200]}, ValueError, "n02_1.JPEG is no readable image"),
        ({"val/images/val_0.JPEG": jpeg(1, size=(32, 64))}, ValueError, "val_0.JPEG is 32×64, each .* is 64×64"),
        ({"words.txt": b"n01 a cat"}, ValueError, "words.txt is empty or damaged: take the official one"),
    ],
)
def test_tiny_imagenet_damaged(tmp_path, damage, error, words):
    files = tiny() | damage
    write(tmp_path, {name: content for name, content in files.items() if content is not None})
    with pytest.raises(error, match=words):
        tiny_imagenet(str(tmp_path), download=False)


@pytest.mark.skipif(not (DATA_DIR / "MNIST").exists(), reason=f"MNIST is not in {DATA_DIR} (DATA_DIR moves it)")
def test_real_mnist(tmp_path):
    (tmp_path / "MNIST").symlink_to(DATA_DIR / "MNIST")  # so that the cache is made anew
    dataset = torchvision_set("mnist", str(tmp_path), download=False)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    np.testing.assert_allclose(dataset.train.x.mean() / 255, 0.1307, atol=1e-4)
