import hashlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.sets import vision
from gcfed.data.sets.datasets import digits, synthetic, tiny_imagenet, torchvision_set

REAL = Path(__file__).parents[2] / os.environ.get("DATA_DIR", "data")
RNG = np.random.default_rng(0)
NOWHERE = "http://127.0.0.1:9"  # nobody listens


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def put(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return md5(content)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """(address, folder) of a local web server."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path_factory.mktemp("web")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", folder
        http.shutdown()


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
    assert sorted(map(tuple, np.array(got))) == sorted(
        map(tuple, np.array(expected))
    )  # each image once, with its label


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


@pytest.fixture(params=["cifar10"])
def cifar(request, tmp_path, monkeypatch):
    """(name, torchvision class, {part: (x, y)}) of a small set in the official format under tmp_path."""
    import torchvision.datasets

    cls = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[request.param]
    classes, key = (10, "labels") if request.param == "cifar10" else (100, "fine_labels")
    expected: dict[str, list] = {"train": [], "test": []}
    for part, attribute in (("train", "train_list"), ("test", "test_list")):
        listed = []
        for file, _ in getattr(cls, attribute):
            x, y = RNG.integers(0, 256, (5, 3072), np.uint8), RNG.integers(0, classes, 5)
            batch = pickle.dumps({"data": x, key: y.tolist()})
            listed.append([file, put(tmp_path / cls.base_folder / file, batch)])
            expected[part].append((x.reshape(5, 3, 32, 32), y))
        monkeypatch.setattr(cls, attribute, listed)
    names = pickle.dumps({cls.meta["key"]: [f"class {i}" for i in range(classes)]})
    meta = put(tmp_path / cls.base_folder / cls.meta["filename"], names)
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": meta})
    monkeypatch.setattr(cls, "url", f"{NOWHERE}/{cls.filename}")
    joined = {
        part: [np.concatenate(arrays) for arrays in zip(*batches, strict=True)] for part, batches in expected.items()
    }
    return request.param, cls, joined


def check(dataset, expected, num_classes):
    for part in ("train", "test"):
        split = getattr(dataset, part)
        np.testing.assert_array_equal(split.x, expected[part][0])
        np.testing.assert_array_equal(split.y, expected[part][1])
    assert dataset.num_classes == num_classes


@pytest.mark.parametrize("cifar", ["cifar10", "cifar100"], indirect=True)
def test_cifar_and_its_cache(cifar, tmp_path):
    name, cls, expected = cifar
    num_classes = int(name.removeprefix("cifar"))
    dataset = torchvision_set(name, str(tmp_path), download=False)
    check(dataset, expected, num_classes)
    assert dataset.class_names[1] == "class 1"
    for path in (tmp_path / cls.base_folder).iterdir():
        path.unlink()
    check(torchvision_set(name, str(tmp_path), download=False), expected, num_classes)  # the cache needs no raw files


def test_cached_sets_import_neither_torch_nor_torchvision(cifar, tmp_path):
    torchvision_set(cifar[0], str(tmp_path))
    script = f"""
import sys
from gcfed.data.sets.datasets import digits, synthetic, torchvision_set
torchvision_set({cifar[0]!r}, {str(tmp_path)!r}), digits(), synthetic(num_train=10)
assert not {{"torch", "torchvision", "PIL"}} & set(sys.modules)
"""
    ours = {"PYTHONPATH": str(Path(vision.__file__).parents[3])}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=os.environ | ours)


@pytest.mark.parametrize("download", [False, True])
def test_cifar_with_a_damaged_file(cifar, tmp_path, download):
    name, cls, _ = cifar
    first = tmp_path / cls.base_folder / cls.train_list[0][0]
    first.write_bytes(first.read_bytes()[:-7])
    words = f"{name}: a file in {cls.base_folder} is missing or broken .*{tmp_path}.*put {cls.base_folder}"
    with pytest.raises(FileNotFoundError, match=words) as caught:
        torchvision_set(name, str(tmp_path), download=download)
    assert ("data.dataset.download=true" in str(caught.value)) != download


def archive_of(cls, folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder / cls.base_folder, cls.base_folder)
    for path in (folder / cls.base_folder).iterdir():
        path.write_bytes(b"broken")
    return buffer.getvalue()


def test_cifar_downloaded(cifar, tmp_path, monkeypatch, server):
    name, cls, expected = cifar
    address, web = server
    archive = archive_of(cls, tmp_path)
    monkeypatch.setattr(cls, "tgz_md5", put(web / cls.filename, archive))
    monkeypatch.setattr(cls, "url", f"{address}/{cls.filename}")
    check(torchvision_set(name, str(tmp_path / "fresh")), expected, int(name.removeprefix("cifar")))
    assert contents(tmp_path / "fresh")[cls.filename] == archive


# the MNIST family


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    return header + array.astype(np.uint8).tobytes()


MNIST_LIKE = {
    "mnist": ("MNIST", "train", "t10k", 10),
    "fashion_mnist": ("FashionMNIST", "train", "t10k", 10),
    "emnist_byclass": ("EMNIST", "emnist-byclass-train", "emnist-byclass-test", 62),
    "emnist_balanced": ("EMNIST", "emnist-balanced-train", "emnist-balanced-test", 47),
}


@pytest.fixture(params=MNIST_LIKE)
def mnist(request):
    """(name, raw folder, {file: content}, {part: (x, y)}, number of classes) of a small set in the official format."""
    class_name, *prefixes, num_classes = MNIST_LIKE[request.param]
    files, expected = {}, {}
    for part, prefix in zip(("train", "test"), prefixes, strict=True):
        x, y = RNG.integers(0, 256, (7, 28, 28), np.uint8), RNG.integers(0, num_classes, 7)
        files |= {f"{prefix}-images-idx3-ubyte": idx(x), f"{prefix}-labels-idx1-ubyte": idx(y)}
        expected[part] = (x[:, None], y)
    return request.param, f"{class_name}/raw", files, expected, num_classes


def test_mnist_unpacked(mnist, tmp_path):
    name, raw, files, expected, num_classes = mnist
    for file, content in files.items():
        put(tmp_path / raw / file, content)
    check(torchvision_set(name, str(tmp_path), download=False), expected, num_classes)


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


# the real sets, where they are


def linked(tmp_path: Path, name: str) -> str:
    """A data folder with one real set in it, so that the cache is made anew and elsewhere."""
    if not (REAL / name).exists():
        pytest.skip(f"{REAL / name} is not there: set DATA_DIR")
    (tmp_path / name).symlink_to(REAL / name)
    return str(tmp_path)


def test_real_cifar10(tmp_path):
    dataset = torchvision_set("cifar10", linked(tmp_path, "cifar-10-batches-py"), download=False)
    assert dataset.train.x.shape == (50_000, 3, 32, 32)
    assert (np.bincount(dataset.train.y) == 5000).all()
    assert (np.bincount(dataset.test.y) == 1000).all()
    assert [dataset.class_names[c] for c in dataset.train.y[:3]] == ["frog", "truck", "truck"]
    # The mean of the training images, as everybody normalises by it: channels are in order R, G, B.
    np.testing.assert_allclose(dataset.train.x.mean((0, 2, 3)) / 255, [0.4914, 0.4822, 0.4465], atol=1e-4)


def test_real_mnist(tmp_path):
    dataset = torchvision_set("mnist", linked(tmp_path, "MNIST"), download=False)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    np.testing.assert_allclose(dataset.train.x.mean() / 255, 0.1307, atol=1e-4)
