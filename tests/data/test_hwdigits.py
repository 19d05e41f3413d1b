"""FedGC's handwritten digits, from small files of each set's own format."""

import bz2
import io
import logging
import shutil
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from test_datasets import NOWHERE, REAL, png_of, put
from torchvision.datasets import SVHN

from gcfed.data.partition import ByGroup
from gcfed.data.sets import hwdigits as module
from gcfed.data.sets.hwdigits import hwdigits, read_mat
from gcfed.utils.rng import generator

RNG = np.random.default_rng(0)
SIZES = {"train": 14, "test": 12}
LABELS = {part: np.arange(n) % 10 for part, n in SIZES.items()}
CIFAR = {part: RNG.integers(0, 256, (9, 3, 32, 32), dtype=np.uint8) for part in SIZES}


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def enlarged(images: np.ndarray) -> np.ndarray:
    """[n, C, s, s] → [n, 3, 32, 32], pixel by pixel: bilinear between centres, the border repeated."""
    side = images.shape[-1]
    place = np.clip((np.arange(32) + 0.5) * side / 32 - 0.5, 0, side - 1)
    low = np.minimum(place.astype(int), side - 2)
    weight = np.zeros((32, side))
    weight[np.arange(32), low], weight[np.arange(32), low + 1] = 1 - (place - low), place - low
    out = np.rint(weight @ images.astype(float) @ weight.T).astype(np.uint8)
    return np.repeat(out, 3, 1) if images.shape[1] == 1 else out


# ------------------------------------------------------------------------------------------------- files of each set
def write_mnist(folder: Path) -> dict[str, np.ndarray]:
    images = {part: pixels(n, 1, 28, 28) for part, n in SIZES.items()}
    for part, file in (("train", "train"), ("test", "t10k")):
        header = b"\0\0\x08\x03" + struct.pack(">3I", SIZES[part], 28, 28)
        put(folder / f"MNIST/raw/{file}-images-idx3-ubyte", header + images[part].tobytes())
        labels = b"\0\0\x08\x01" + struct.pack(">I", SIZES[part]) + LABELS[part].astype(np.uint8).tobytes()
        put(folder / f"MNIST/raw/{file}-labels-idx1-ubyte", labels)
    return images


def write_usps(folder: Path) -> dict[str, np.ndarray]:
    images = {part: pixels(n, 1, 16, 16) for part, n in SIZES.items()}
    for part, file in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        rows = images[part].reshape(SIZES[part], -1) / 127.5 - 1 + 1e-4  # torchvision cuts off what is left of a level
        lines = [
            " ".join([str(y + 1), *(f"{i + 1}:{v:.6f}" for i, v in enumerate(row))])
            for y, row in zip(LABELS[part], rows, strict=True)
        ]
        put(folder / "USPS" / file, bz2.compress("\n".join(lines).encode() + b"\n"))
    return images


def png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "png")
    return buffer.getvalue()


def write_mnist_m(folder: Path) -> dict[str, np.ndarray]:
    images = {part: pixels(n, 3, 32, 32) for part, n in SIZES.items()}
    for part, n in SIZES.items():
        names = [f"{i:08d}.png" for i in range(n)]
        lines = [f"{name} {y}\n" for name, y in zip(names, LABELS[part], strict=True)]
        put(folder / f"mnist_m/mnist_m_{part}_labels.txt", "".join(lines).encode())
        for name, image in zip(names, images[part], strict=True):
            put(folder / f"mnist_m/mnist_m_{part}/{name}", png(image))
    return images


def element(kind: int, data: bytes) -> bytes:
    if len(data) <= 4:
        return struct.pack("<HH", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(name: str, array: np.ndarray, kind: int) -> bytes:
    flags = element(6, struct.pack("<II", 9, 0))
    shape = element(5, np.array(array.shape, "<i4").tobytes())
    return element(14, flags + shape + element(1, name.encode()) + element(kind, array.tobytes(order="F")))


def mat(*matrices: bytes, compress: bool = True) -> bytes:
    header = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    if compress:
        packed = [zlib.compress(m) for m in matrices]
        matrices = tuple(struct.pack("<II", 15, len(p)) + p for p in packed)
    return header + b"".join(matrices)


def write_svhn(folder: Path, monkeypatch, *, compress: bool = True) -> dict[str, np.ndarray]:
    images = {part: pixels(n, 3, 32, 32) for part, n in SIZES.items()}
    for part, x in images.items():
        y = np.where(LABELS[part] == 0, 10, LABELS[part])[:, None]
        as_doubles = matrix("y", y.astype("<f8"), 9) if part == "train" else matrix("y", y.astype(np.uint8), 2)
        content = mat(matrix("X", x.transpose(2, 3, 1, 0), 2), as_doubles, compress=compress)
        url, file, _ = SVHN.split_list[part]
        monkeypatch.setitem(SVHN.split_list, part, [url, file, put(folder / "SVHN" / file, content)])
    return images


@pytest.fixture
def photos(monkeypatch):
    """CIFAR-10 of nine images a part; MNIST as ever."""
    real = module.torchvision_set

    def fake(name, data_dir, download=True):
        if name == "mnist":
            return real(name, data_dir, download)
        splits = {part: module.Split(x, np.arange(9)) for part, x in CIFAR.items()}
        return module.FederatedDataset("cifar10", 10, **splits)

    monkeypatch.setattr(module, "torchvision_set", fake)


# ------------------------------------------------------------------------------------------------------------ loading
def test_all_four_sets_one_client_each_and_one_class_each(tmp_path, monkeypatch):
    written = [write_mnist(tmp_path), write_mnist_m(tmp_path), write_usps(tmp_path), write_svhn(tmp_path, monkeypatch)]
    dataset = hwdigits(str(tmp_path), download=False)
    for part, n in SIZES.items():
        split = getattr(dataset, part)
        np.testing.assert_array_equal(split.x, np.concatenate([enlarged(images[part]) for images in written]))
        np.testing.assert_array_equal(split.y, np.tile(LABELS[part], 4))
        np.testing.assert_array_equal(split.groups, np.repeat(np.arange(4), n))
    assert (dataset.num_classes, dataset.class_names[3]) == (10, "3")
    assert isinstance(dataset.train.x, np.memmap)

    clients = ByGroup()(dataset.train.y, None, groups=dataset.train.groups)
    assert clients.sizes.tolist() == [14] * 4
    shutil.rmtree(tmp_path / "SVHN")  # from here on from the cache
    by_class = hwdigits(str(tmp_path), download=False, one_class=True)
    np.testing.assert_array_equal(by_class.train.groups, np.repeat(np.arange(4) * 10, 14) + np.tile(LABELS["train"], 4))
    clients = ByGroup()(by_class.train.y, None, groups=by_class.train.groups)
    assert clients.sizes.tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 1, 1] * 4
    assert by_class.test.groups.max() == 39


def test_any_composition_in_any_order(tmp_path):
    usps, mnist = write_usps(tmp_path), write_mnist(tmp_path)
    dataset = hwdigits(str(tmp_path), sets=["usps", "mnist"])
    np.testing.assert_array_equal(dataset.test.x, np.concatenate([enlarged(usps["test"]), enlarged(mnist["test"])]))
    assert len(hwdigits(str(tmp_path), sets=["usps"]).train) == 14


@pytest.mark.parametrize("prefix", ["", "./"])
def test_mnist_m_from_its_packed_archive(tmp_path, prefix):
    images = write_mnist_m(tmp_path)
    with tarfile.open(tmp_path / "mnist_m.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "mnist_m", f"{prefix}mnist_m")
    shutil.rmtree(tmp_path / "mnist_m")
    dataset = hwdigits(str(tmp_path), sets=["mnist_m"])
    np.testing.assert_array_equal(dataset.train.x, images["train"])
    np.testing.assert_array_equal(dataset.test.y, LABELS["test"])


def blended(digits: np.ndarray, photos: np.ndarray, part: str) -> np.ndarray:
    """One image after the other, in whole numbers."""
    rng = generator(0, "mnist_m", part == "test")
    photo, row, column = rng.integers(9, size=len(digits)), *rng.integers(5, size=(2, len(digits)))
    out = np.empty((len(digits), 3, 28, 28), int)
    for i, digit in enumerate(digits.astype(int)):
        for channel in range(3):
            patch = photos[photo[i], channel, row[i] : row[i] + 28, column[i] : column[i] + 28].astype(int)
            out[i, channel] = abs(digit[0] - patch)
    return out


def test_without_its_archive_mnist_m_is_blended_and_the_cache_knows(tmp_path, photos, caplog):
    mnist = write_mnist(tmp_path)
    with caplog.at_level(logging.WARNING):
        dataset = hwdigits(str(tmp_path), sets=["mnist_m"])
    assert "blended from MNIST and CIFAR-10" in caplog.text
    for part in SIZES:
        expected = enlarged(blended(mnist[part], CIFAR[part], part))
        np.testing.assert_array_equal(getattr(dataset, part).x, expected)
        np.testing.assert_array_equal(getattr(dataset, part).y, LABELS[part])

    images = write_mnist_m(tmp_path)
    caplog.clear()
    np.testing.assert_array_equal(hwdigits(str(tmp_path), sets=["mnist_m"]).train.x, images["train"])
    np.testing.assert_array_equal(hwdigits(str(tmp_path), sets=["mnist_m_blend"]).train.x, dataset.train.x)
    assert not caplog.text
    shutil.rmtree(tmp_path / "mnist_m")  # what was made of it stays what it is
    np.testing.assert_array_equal(hwdigits(str(tmp_path), sets=["mnist_m"]).train.x, images["train"])
    assert not caplog.text

    more = write_mnist_m(tmp_path)
    (tmp_path / "mnist_m/mnist_m_train/99999999.png").write_bytes(b"")
    np.testing.assert_array_equal(hwdigits(str(tmp_path), sets=["mnist_m"]).train.x, more["train"])


@pytest.mark.parametrize(("data", "clients"), [("hwdigits4", 2), ("hwdigits40", 20)])
def test_the_clients_follow_the_sets(config, data, clients):
    cfg = config(f"data={data}", "model=fedgc_cnn", "data.dataset.sets=[mnist,usps]")
    assert cfg.data.num_clients == cfg.participation.per_round == clients
    assert cfg.gc.boundary == "fc3"


# ------------------------------------------------------------------------------------------------------- what is wrong
def test_what_is_not_there_is_named_with_the_way_out(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    sets = ["mnist", "svhn"]
    with pytest.raises(FileNotFoundError, match=r"train_32x32\.mat is missing.*ufldl.*data\.dataset\.sets=\[mnist\]$"):
        hwdigits(str(tmp_path), download=False, sets=sets)
    monkeypatch.setitem(SVHN.split_list, "train", [NOWHERE, *SVHN.split_list["train"][1:]])
    with pytest.raises(FileNotFoundError, match=r"svhn: train_32x32\.mat could not be downloaded"):
        hwdigits(str(tmp_path), sets=sets)
    with pytest.raises(FileNotFoundError, match=r"usps\.bz2 is missing.*ntu\.edu\.tw"):
        hwdigits(str(tmp_path), download=False, sets=["usps"])
    with pytest.raises(FileNotFoundError, match=r"mnist_m\.tar\.gz from .*ganin.*CIFAR-10 is missing too.*Or leave"):
        hwdigits(str(tmp_path), download=False, sets=["mnist_m"])
    put(tmp_path / "SVHN" / "train_32x32.mat", b"cut short")
    with pytest.raises(ValueError, match=r"train_32x32\.mat has the wrong checksum"):
        hwdigits(str(tmp_path), sets=sets)


def test_broken_files_are_named(tmp_path):
    write_mnist_m(tmp_path)
    for content in (b"text", png_of(2**15, 2**15), png(pixels(3, 1, 32)), png(pixels(3, 32, 32))[:-99]):
        put(tmp_path / "mnist_m/mnist_m_test/00000003.png", content)
        with pytest.raises(ValueError, match=r"mnist_m_test/00000003\.png is no readable image"):
            hwdigits(str(tmp_path), sets=["mnist_m"])
    (tmp_path / "mnist_m/mnist_m_test/00000003.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"mnist_m_test/00000003\.png is missing.*put mnist_m\.tar\.gz"):
        hwdigits(str(tmp_path), sets=["mnist_m"])


@pytest.mark.parametrize(
    "line", ["1 1:0.5 2:1", "1 " + "1:0 " * 255 + "1:nan", "11 " + "1:0 " * 256, "1 " + "1:0 " * 512, "", "\xff"]
)
def test_a_broken_line_of_usps_is_named(tmp_path, line):
    write_usps(tmp_path)
    whole = bz2.compress(line.encode("latin-1") + b"\n")
    for content in (whole, whole[:-9], b"no archive"):
        put(tmp_path / "USPS" / "usps.bz2", content)
        with pytest.raises(ValueError, match=r"usps\.bz2 cannot be read .*: move it away"):
            hwdigits(str(tmp_path), sets=["usps"])


@pytest.mark.parametrize("line", ["../a.png 3", "00000003.png 10", "00000003.png", "00000003.png 1.5", "", "\xff 1"])
def test_a_broken_table_of_mnist_m_is_named(tmp_path, line):
    write_mnist_m(tmp_path)
    put(tmp_path / "mnist_m/mnist_m_train_labels.txt", line.encode("latin-1"))
    with pytest.raises(ValueError, match=r"_labels\.txt (is empty or damaged|has a line .*): take the official one"):
        hwdigits(str(tmp_path), sets=["mnist_m"])


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b[:200] + bytes(99) + b[299:], lambda b: b"text"])
def test_a_broken_archive_of_mnist_m_is_named(tmp_path, damage):
    write_mnist_m(tmp_path)
    with tarfile.open(tmp_path / "mnist_m.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "mnist_m", "mnist_m")
    shutil.rmtree(tmp_path / "mnist_m")
    put(tmp_path / "mnist_m.tar.gz", damage((tmp_path / "mnist_m.tar.gz").read_bytes()))
    with pytest.raises(ValueError, match=r"mnist_m\.tar\.gz cannot be read .*: get it anew from http"):
        hwdigits(str(tmp_path), sets=["mnist_m"])


@pytest.mark.parametrize("sets", [[], ["mnist", "mnist"], ["emnist"]])
def test_sets_are_refused_by_name(tmp_path, sets):
    with pytest.raises(ValueError, match=r"^sets=.*mnist, mnist_m, usps, svhn, mnist_m_blend"):
        hwdigits(str(tmp_path), sets=sets)


# -------------------------------------------------------------------------------------------------------------- MATLAB
@pytest.mark.parametrize("compress", [True, False])
def test_matlab_files(tmp_path, compress):
    x, y = pixels(2, 3, 4), np.array([[1.5], [-2.0]])
    tiny = np.array([[7, 9]], np.uint8)  # shares a word with its tag
    content = mat(matrix("x", x, 2), matrix("yy", y, 9), matrix("a longer name", tiny, 2), compress=compress)
    put(tmp_path / "a.mat", content)
    arrays = read_mat(tmp_path / "a.mat")
    assert list(arrays) == ["x", "yy", "a longer name"]
    for array, expected in zip(arrays.values(), (x, y, tiny), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


# ----------------------------------------------------------------------------------------------------------- real data
@pytest.mark.skipif(not (REAL / "USPS" / "usps.bz2").exists(), reason="USPS is not on this machine")
def test_real_usps():
    images, labels = module.READ["usps"](REAL, False, "test")
    assert images.shape == (2007, 1, 16, 16)
    assert np.bincount(labels).tolist() == [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
