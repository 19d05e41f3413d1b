import gzip
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
    for floats in (np.array([[1.0, np.nan]]), np.array([[1.0, np.inf]])):
        for bad in [(floats, np.ones((1, 1))), (np.ones((1, 2)), floats)]:
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


@pytest.mark.parametrize(
    ("num_classes", "shape"), [(10, (1, 8, 8)), (3, (3, 17, 5)), (62, (1, 28, 28)), (4, (2, 2, 2))]
)
def test_synthetic_is_a_task_of_any_shape_that_can_be_learned(num_classes, shape):
    dataset = synthetic(num_classes=num_classes, shape=shape, num_train=2000, num_test=500, noise=20)
    assert dataset.train.x.shape == (2000, *shape)
    assert np.ptp(np.bincount(dataset.train.y, minlength=num_classes)) <= 1
    assert nearest_prototype_accuracy(dataset) > 0.9
    assert not np.array_equal(dataset.train.x[:500], dataset.test.x)


def test_synthetic_gets_harder_with_noise_and_is_chance_at_the_end():
    accuracy = [nearest_prototype_accuracy(synthetic(num_train=3000, noise=noise)) for noise in (0, 150, 1e6)]
    assert accuracy[0] == 1 > accuracy[1] > 0.3
    assert accuracy[2] < 0.2


def test_synthetic_is_a_function_of_its_seed():
    first, again, other = (synthetic(num_train=100, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.train.x, again.train.x)
    assert not np.array_equal(first.train.x, other.train.x)


def test_synthetic_groups_shift_the_domain():
    dataset = synthetic(num_groups=4, num_train=4000, noise=0, shift=30)
    assert (np.bincount(dataset.train.groups) == 1000).all()
    assert (np.bincount(dataset.test.groups) == 500).all()
    seen = {(y, g) for y, g in zip(dataset.train.y.tolist(), dataset.train.groups.tolist(), strict=True)}
    assert len(seen) == 40  # every class in every domain
    pairs = np.stack([dataset.train.y, dataset.train.groups], 1)
    for y, g in seen:  # without noise, class and domain are all there is to an image
        of_pair = dataset.train.x[(pairs == (y, g)).all(1)]
        assert (of_pair == of_pair[0]).all()
    assert len(np.unique(dataset.train.x.reshape(4000, -1), axis=0)) == 40


def test_synthetic_of_many_samples_is_filled_to_the_end():
    x = synthetic(num_train=140_000).train.x  # two blocks of 65,536 and a rest
    assert (x.reshape(140_000, -1).std(1) > 10).all()
    assert not np.array_equal(x[:4464], x[131_072 : 131_072 + 4464])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_classes": 0}, "^num_classes=0"),
        ({"num_train": 0}, "^num_train=0"),
        ({"shape": (8, 8)}, "^shape="),
        ({"noise": -1}, "^noise=-1"),
        ({"num_groups": 0}, "^num_groups=0"),
    ],
)
def test_synthetic_refuses_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        synthetic(**options)


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
def test_cifar_with_a_truncated_file(cifar, tmp_path, download):
    name, cls, _ = cifar
    broken = tmp_path / cls.base_folder / cls.test_list[0][0]
    broken.write_bytes(broken.read_bytes()[:-7])
    before = contents(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        torchvision_set(name, str(tmp_path), download=download)
    message = str(caught.value)
    trouble = f"{cls.filename} could not be downloaded" if download else f"a file in {cls.base_folder} is missing"
    for words in (name, trouble, str(tmp_path), "cs.toronto.edu", "paths.data_dir"):
        assert words in message
    assert ("data.dataset.download=true" in message) != download
    assert contents(tmp_path) == before  # nothing is lost, nothing half-done stays


def test_cifar_with_missing_files(cifar, tmp_path):
    name, cls, _ = cifar
    first = cls.train_list[0][0]
    (tmp_path / cls.base_folder / first).unlink()
    words = f"{name}: a file in {cls.base_folder} is missing .*{tmp_path}.*download=true, or put {cls.filename}"
    with pytest.raises(FileNotFoundError, match=words):
        torchvision_set(name, str(tmp_path), download=False)


def archive_of(cls, folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder / cls.base_folder, cls.base_folder)
    for path in (folder / cls.base_folder).iterdir():
        path.write_bytes(b"broken")
    return buffer.getvalue()


def test_cifar_from_its_archive_beside_a_broken_folder(cifar, tmp_path, monkeypatch):
    name, cls, expected = cifar
    monkeypatch.setattr(cls, "tgz_md5", put(tmp_path / cls.filename, archive_of(cls, tmp_path)))
    before = contents(tmp_path)
    check(torchvision_set(name, str(tmp_path), download=False), expected, int(name.removeprefix("cifar")))
    assert contents(tmp_path) == before


def test_cifar_downloaded(cifar, tmp_path, monkeypatch, server):
    name, cls, expected = cifar
    address, web = server
    archive = archive_of(cls, tmp_path)
    monkeypatch.setattr(cls, "tgz_md5", put(web / cls.filename, archive))
    monkeypatch.setattr(cls, "url", f"{address}/{cls.filename}")
    check(torchvision_set(name, str(tmp_path / "fresh")), expected, int(name.removeprefix("cifar")))
    assert contents(tmp_path / "fresh") == {cls.filename: archive}


def test_a_download_that_is_cut_short_leaves_nothing(cifar, tmp_path, monkeypatch, server):
    name, cls, _ = cifar
    address, web = server
    put(web / cls.filename, archive_of(cls, tmp_path)[:-10])
    monkeypatch.setattr(cls, "url", f"{address}/{cls.filename}")
    with pytest.raises(FileNotFoundError, match=f"{cls.filename} could not be downloaded"):
        torchvision_set(name, str(tmp_path / "fresh"))
    assert contents(tmp_path / "fresh") == {}


def test_a_truncated_archive_is_named_and_kept(cifar, tmp_path):
    name, cls, _ = cifar
    put(tmp_path / cls.filename, archive_of(cls, tmp_path)[:-10])
    before = contents(tmp_path)
    for download in (False, True):
        with pytest.raises(ValueError, match=rf"{name}: .*{cls.filename} has the wrong checksum .*move it away"):
            torchvision_set(name, str(tmp_path), download=download)
    assert contents(tmp_path) == before


def test_unknown_name():
    with pytest.raises(ValueError, match=r"^name=cifar is not one of cifar10, cifar100, mnist"):
        torchvision_set("cifar", "anywhere")


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


@pytest.mark.parametrize("mnist", ["mnist", "emnist_balanced"], indirect=True)
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_mnist_damaged(mnist, tmp_path, damage):
    name, raw, files, _, _ = mnist
    for file, content in files.items():
        put(tmp_path / raw / file, content)
    first = tmp_path / raw / next(iter(files))
    if damage == "missing":
        first.unlink()
    else:
        put(first, first.read_bytes()[:-1])
    words = (
        rf"{name}: a file in {raw} is missing or broken .*data\.dataset\.download=true, or put .*gz.*paths\.data_dir"
    )
    with pytest.raises(FileNotFoundError, match=words.replace("gz", "zip") if "emnist" in name else words):
        torchvision_set(name, str(tmp_path), download=False)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ((7, 14, 56), np.zeros(7), "a file in FashionMNIST/raw is missing or broken"),
        ((7, 28, 28), np.zeros((7, 1)), "a file in FashionMNIST/raw is missing or broken"),
        ((7, 28, 28), np.zeros(6), r"labels must be int64 \[7\].*: get the files of fashion_mnist in .* anew"),
        (
            (7, 28, 28),
            np.full(7, 10),
            r"train labels 10 … 10 for 10 classes: get the files of .* anew",
        ),
        ((0, 28, 28), np.zeros(0), "a file in FashionMNIST/raw is missing or broken"),
    ],
)
def test_idx_files_that_do_not_fit(tmp_path, x, y, words):
    for part, shape, labels in (("train", x, y), ("t10k", (7, 28, 28), np.zeros(7))):
        put(tmp_path / f"FashionMNIST/raw/{part}-images-idx3-ubyte", idx(np.zeros(shape)))
        put(tmp_path / f"FashionMNIST/raw/{part}-labels-idx1-ubyte", idx(labels))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        torchvision_set("fashion_mnist", str(tmp_path), download=False)
    assert not list(tmp_path.glob("cache/fashion_mnist/*"))


def test_mnist_downloaded(mnist, tmp_path, monkeypatch, server):
    import torchvision.datasets

    name, raw, files, expected, num_classes = mnist
    address, web = server
    cls = getattr(torchvision.datasets, raw.split("/")[0])
    if name.startswith("emnist"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for file, content in files.items():
                archive.writestr(f"gzip/{file}.gz", gzip.compress(content))
        monkeypatch.setattr(cls, "url", f"{address}/gzip.zip")
        monkeypatch.setattr(cls, "md5", put(web / "gzip.zip", buffer.getvalue()))
        archives = {f"{raw}/gzip.zip"}
    else:
        resources = [(f"{file}.gz", put(web / f"{file}.gz", gzip.compress(content))) for file, content in files.items()]
        monkeypatch.setattr(cls, "resources", resources)
        monkeypatch.setattr(cls, "mirrors", [f"{NOWHERE}/", f"{address}/"])  # the second must be tried
        archives = {f"{raw}/{file}" for file, _ in resources}
    check(torchvision_set(name, str(tmp_path)), expected, num_classes)
    assert set(contents(tmp_path)) == archives


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


def test_tiny_imagenet_downloaded(tmp_path, monkeypatch, server):
    address, web = server
    monkeypatch.setattr(vision, "MD5", put(web / "tiny-imagenet-200.zip", zipped(tiny())))
    monkeypatch.setattr(vision, "URL", f"{address}/tiny-imagenet-200.zip")
    check_tiny(tiny_imagenet(str(tmp_path)))


def test_tiny_imagenet_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "URL", f"{NOWHERE}/tiny-imagenet-200.zip")
    with pytest.raises(FileNotFoundError, match=r"tiny-imagenet-200\.zip is missing .*data\.dataset\.download=true"):
        tiny_imagenet(str(tmp_path), download=False)
    with pytest.raises(FileNotFoundError, match=r"tiny-imagenet-200\.zip could not be downloaded .*paths\.data_dir"):
        tiny_imagenet(str(tmp_path))
    put(tmp_path / "tiny-imagenet-200.zip", b"half")
    with pytest.raises(ValueError, match=r"tiny-imagenet-200\.zip has the wrong checksum"):
        tiny_imagenet(str(tmp_path))
    assert contents(tmp_path) == {"tiny-imagenet-200.zip": b"half"}


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        ({"words.txt": None}, FileNotFoundError, "words.txt is missing"),
        ({"val/images/val_1.JPEG": None}, FileNotFoundError, "val/images/val_1.JPEG is missing"),
        ({f"train/n02/images/n02_{i}.JPEG": None for i in (0, 1)}, FileNotFoundError, "no image for 1 classes .* n02"),
        ({"train/n07/images/n07_0.JPEG": jpeg(1)}, ValueError, "n07 is not in .*tiny-imagenet-200/wnids.txt"),
        ({"train/n02/images/n02_1.JPEG": jpeg(1)[:-200]}, ValueError, "n02_1.JPEG is no readable image"),
        ({"train/n02/images/n02_1.JPEG": b"text"}, ValueError, "n02_1.JPEG is no readable image"),
        ({"val/images/val_0.JPEG": jpeg(1, size=(32, 64))}, ValueError, "val_0.JPEG is no .*it is 32×64, not 64×64"),
        ({"val/images/val_0.JPEG": png_of(2**15, 2**15)}, ValueError, "val_0.JPEG is no .*decompression bomb"),
        ({"words.txt": b"n01 a cat"}, ValueError, "words.txt is empty or damaged: take the official one"),
        ({"words.txt": b"n01\t\xff"}, ValueError, "words.txt is empty or damaged: take the official one"),
        ({"val/val_annotations.txt": b"val_0.JPEG\n"}, ValueError, "val_annotations.txt is empty or damaged"),
        ({"val/val_annotations.txt": b"\n"}, ValueError, "val_annotations.txt is empty or damaged"),
        ({"wnids.txt": b"n01\nn01\nn02\nn03"}, ValueError, "wnids.txt names a class twice"),
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


@pytest.mark.parametrize(
    ("name", "folder", "mean"), [("mnist", "MNIST", 0.1307), ("fashion_mnist", "FashionMNIST", 0.2860)]
)
def test_real_mnist(tmp_path, name, folder, mean):
    dataset = torchvision_set(name, linked(tmp_path, folder), download=False)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    np.testing.assert_allclose(dataset.train.x.mean() / 255, mean, atol=1e-4)


def test_real_tiny_imagenet(tmp_path):
    dataset = tiny_imagenet(linked(tmp_path, "tiny-imagenet-200"), download=False)
    assert dataset.num_classes == 200
    assert np.bincount(dataset.train.y, minlength=200).min() >= 1
    assert dataset.class_names[0] == "Egyptian cat"
