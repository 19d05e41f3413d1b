"""The data sets of this package and of torchvision, and TinyImageNet: known files
→ known arrays.
"""

import hashlib
import io
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA_DIR
from PIL import Image

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets import vision
from gcfed.data.sets.datasets import digits, synthetic, tiny_imagenet, torchvision_set
from gcfed.data.sets.files import obtain

RNG = np.random.default_rng(0)
NOWHERE = "http://127.0.0.1:9"  # nothing listens at this port


def put(path: Path, content: bytes) -> str:
    """Writes a file and returns its md5."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return hashlib.md5(content).hexdigest()


X = np.zeros((3, 1, 2, 2), np.uint8)
Y = np.array([0, 1, 2])
TOKENS = np.zeros((3, 5), np.uint8)
LABELS = np.zeros((3, 5), np.int64)
GOOD = Split(X, Y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Split(X.astype(float), Y),
            r"must be .*\(x \* 255\)\.round\(\)\.astype\('uint8'\) makes images",
        ),
        (
            lambda: Split(X.astype(float) + np.arange(3)[:, None, None, None] - 1, Y),
            r"not float64 .*: \(\(x - x\.min\(\)\) \* \(255 / .* makes images of normalised values",
        ),
        (lambda: Split(np.full((3, 1, 2, 2), -1.0), Y), r"or floats \[n, d\], not float64 .*\]$"),
        (
            lambda: Split(np.ones((3, 2), np.int64), Y),
            r"int64 \[3, 2\]: x\.astype\('float32'\) makes a table of numbers",
        ),
        (lambda: Split(X[:, 0], Y), "must be"),
        (lambda: Split(X, Y.astype(np.int32)), "must be"),
        (lambda: Split(TOKENS, LABELS[:, :4]), "must be"),
        (lambda: Split(TOKENS.astype(np.int64), LABELS), "must be"),
        (lambda: Split(np.ones((1, 2)), np.array([[1.0, np.inf]])), "must be finite numbers"),
        (lambda: FederatedDataset("toy", 2, GOOD, GOOD), "'toy': train labels 0 … 2 for 2 classes"),
        (lambda: FederatedDataset("toy", 3, GOOD, GOOD, ("a", "b")), "2 class names for 3 classes"),
        (
            lambda: FederatedDataset("toy", 3, GOOD, Split(X[..., :1], Y)),
            r"training samples have the shape \[1, 2, 2\], test samples \[1, 2, 1\]",
        ),
    ],
)
def test_splits_and_sets_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_split_of_digits_uses_each_image_once():
    dataset = digits()
    assert dataset.train.x.shape == (1437, 1, 8, 8)
    assert dataset.test.x.shape == (360, 1, 8, 8)
    train = np.bincount(dataset.train.y)
    test = np.bincount(dataset.test.y)
    np.testing.assert_allclose(test, (train + test) * 360 / 1797, atol=1)
    with np.load(Path(vision.__file__).with_name("digits.npz")) as raw:
        expected = [
            (*np.round(x.ravel() * 255.0 / 16), y) for x, y in zip(raw["x"], raw["y"], strict=True)
        ]
    got = [
        (*x.ravel(), y)
        for split in (dataset.train, dataset.test)
        for x, y in zip(split.x, split.y, strict=True)
    ]
    # each image once
    assert sorted(map(tuple, np.array(got))) == sorted(map(tuple, np.array(expected)))


@pytest.mark.parametrize(("num_classes", "shape"), [(3, (3, 17, 5)), (4, (2, 2, 2))])
def test_synthetic_images_can_be_learned(num_classes, shape):
    """A nearest-class-mean classifier has an accuracy above 90 %."""
    dataset = synthetic(
        num_classes=num_classes, shape=shape, num_train=2000, num_test=500, noise=20
    )
    assert dataset.train.x.shape == (2000, *shape)
    assert np.ptp(np.bincount(dataset.train.y, minlength=num_classes)) <= 1
    train, test = (
        split.x.reshape(len(split), -1).astype(np.float32)
        for split in (dataset.train, dataset.test)
    )
    means = np.stack([train[dataset.train.y == c].mean(0) for c in range(num_classes)])
    assert (((test[:, None] - means) ** 2).sum(-1).argmin(1) == dataset.test.y).mean() > 0.9
    assert not np.array_equal(train[:500], test)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """(torchvision class, {part: (x, y)}) of a small CIFAR-10 in the official format under
    tmp_path.
    """
    from torchvision.datasets import CIFAR10 as cls

    expected: dict[str, list] = {"train": [], "test": []}
    for part, attribute in (("train", "train_list"), ("test", "test_list")):
        listed = []
        for file, _ in getattr(cls, attribute):
            x = RNG.integers(0, 256, (5, 3072), np.uint8)
            y = RNG.integers(0, 10, 5)
            batch = pickle.dumps({"data": x, "labels": y.tolist()})
            listed.append([file, put(tmp_path / cls.base_folder / file, batch)])
            expected[part].append((x.reshape(5, 3, 32, 32), y))
        monkeypatch.setattr(cls, attribute, listed)
    names = pickle.dumps({cls.meta["key"]: [f"class {i}" for i in range(10)]})
    meta = put(tmp_path / cls.base_folder / cls.meta["filename"], names)
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": meta})
    monkeypatch.setattr(cls, "url", f"{NOWHERE}/{cls.filename}")
    return cls, {
        part: [np.concatenate(a) for a in zip(*batches, strict=True)]
        for part, batches in expected.items()
    }


def check(dataset, expected, num_classes):
    for part in ("train", "test"):
        split = getattr(dataset, part)
        np.testing.assert_array_equal(split.x, expected[part][0])
        np.testing.assert_array_equal(split.y, expected[part][1])
    assert dataset.num_classes == num_classes


def test_cifar_is_read_checked_and_cached(cifar, tmp_path):
    cls, expected = cifar
    first = tmp_path / cls.base_folder / cls.train_list[0][0]
    content = first.read_bytes()
    first.write_bytes(content[:-7])
    words = (
        f"data set cifar10: a file is missing or broken .*{tmp_path}.* data.dataset.download=true,"
        " put the files of"
    )
    with pytest.raises(FileNotFoundError, match=words):
        torchvision_set("cifar10", str(tmp_path), download=False)
    first.write_bytes(content)
    dataset = torchvision_set("cifar10", str(tmp_path), download=False)
    check(dataset, expected, 10)
    assert dataset.class_names[1] == "class 1"
    for path in (tmp_path / cls.base_folder).iterdir():
        path.unlink()
    # the cache needs no raw files
    check(torchvision_set("cifar10", str(tmp_path), download=False), expected, 10)


def test_a_file_is_downloaded_if_it_is_missing_or_damaged(tmp_path, monkeypatch):
    def download_url(url, root, name, md5):
        assert url == "an address"
        assert md5 == right
        put(root / name, b"content")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)
    right = hashlib.md5(b"content").hexdigest()
    path = tmp_path / "x.bin"
    for found in (None, b"cut short"):
        if found:
            path.write_bytes(found)
        with pytest.raises(
            FileNotFoundError, match=r"toy: x\.bin is missing, or its md5 .* files of an address"
        ):
            obtain(path, right, "an address", "toy", download=False)
        obtain(path, right, "an address", "toy", download=True)
        assert path.read_bytes() == b"content"


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        length.to_bytes(4, "big") for length in array.shape
    )
    return header + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("name", "raw", "prefixes", "classes"),
    [
        ("fashion_mnist", "FashionMNIST", ("train", "t10k"), 10),
        ("emnist_byclass", "EMNIST", ("emnist-byclass-train", "emnist-byclass-test"), 62),
    ],
)
def test_the_mnist_family_is_read(tmp_path, name, raw, prefixes, classes):
    expected = {}
    for part, prefix in zip(("train", "test"), prefixes, strict=True):
        x = RNG.integers(0, 256, (7, 28, 28), np.uint8)
        y = RNG.integers(0, classes, 7)
        put(tmp_path / raw / "raw" / f"{prefix}-images-idx3-ubyte", idx(x))
        put(tmp_path / raw / "raw" / f"{prefix}-labels-idx1-ubyte", idx(y))
        expected[part] = (x[:, None], y)
    check(torchvision_set(name, str(tmp_path), download=False), expected, classes)


WNIDS = ["n03", "n01", "n02"]  # not sorted, because the order in the file matters


def jpeg(value: int, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(buffer, "JPEG", quality=100)
    return buffer.getvalue()


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


def test_tiny_imagenet_from_its_archive(tmp_path, monkeypatch):
    write(tmp_path / "raw", tiny())
    archive = shutil.make_archive(
        tmp_path / "tiny-imagenet-200", "zip", tmp_path / "raw", "tiny-imagenet-200"
    )
    monkeypatch.setattr(vision, "MD5", hashlib.md5(Path(archive).read_bytes()).hexdigest())
    check_tiny(tiny_imagenet(str(tmp_path), download=False))
    Path(archive).unlink()
    check_tiny(tiny_imagenet(str(tmp_path), download=False))  # from the cache
    assert not [*tmp_path.glob(".unpack-*")]


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        ({"words.txt": None}, FileNotFoundError, "words.txt"),
        (
            {"val/images/val_1.JPEG": None},
            ValueError,
            "val/images/val_1.JPEG is no readable image .*No such file",
        ),
        (
            {"train/n07/images/n07_0.JPEG": jpeg(1)},
            ValueError,
            "image of n07, or wnids.txt lacks it",
        ),
        (
            {"val/images/val_0.JPEG": jpeg(1, size=(32, 64))},
            ValueError,
            "val_1.JPEG is 64×64, .*val_0.JPEG is 32×64",
        ),
        (
            {"words.txt": b"n01 a cat"},
            ValueError,
            "words.txt is empty or damaged: take the official one",
        ),
    ],
)
def test_a_damaged_tiny_imagenet_is_refused(tmp_path, damage, error, words):
    files = tiny() | damage
    write(tmp_path, {name: content for name, content in files.items() if content is not None})
    with pytest.raises(error, match=words):
        tiny_imagenet(str(tmp_path), download=False)


@pytest.mark.skipif(
    not (DATA_DIR / "MNIST").exists(), reason=f"MNIST is not in {DATA_DIR} (DATA_DIR moves it)"
)
def test_real_mnist(tmp_path):
    (tmp_path / "MNIST").symlink_to(DATA_DIR / "MNIST")  # so the cache is built again
    dataset = torchvision_set("mnist", str(tmp_path), download=False)
    assert len(dataset.train) == 60_000
    assert len(dataset.test) == 10_000
    np.testing.assert_allclose(dataset.train.x.mean() / 255, 0.1307, atol=1e-4)
