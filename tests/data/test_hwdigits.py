"""FedGC's handwritten digits, from small files of each set's own format."""

import bz2
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_datasets import NOWHERE, idx, put
from torchvision.datasets import SVHN

from gcfed.data.partition import ByGroup
from gcfed.data.sets.hwdigits import hwdigits

RNG = np.random.default_rng(0)
SIZES = {"train": 14, "test": 12}
LABELS = {part: np.arange(n) % 10 for part, n in SIZES.items()}


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def enlarged(images: np.ndarray) -> np.ndarray:
    """[n, C, s, s] → [n, 3, 32, 32], pixel by pixel: bilinear between centres, the
    border repeated.
    """
    side = images.shape[-1]
    place = np.clip((np.arange(32) + 0.5) * side / 32 - 0.5, 0, side - 1)
    low = np.minimum(place.astype(int), side - 2)
    weight = np.zeros((32, side))
    weight[np.arange(32), low] = 1 - (place - low)
    weight[np.arange(32), low + 1] = place - low
    out = np.rint(weight @ images.astype(float) @ weight.T).astype(np.uint8)
    return np.repeat(out, 3, 1) if images.shape[1] == 1 else out


def write_mnist(folder: Path) -> dict[str, np.ndarray]:
    images = {part: pixels(n, 1, 28, 28) for part, n in SIZES.items()}
    for part, file in (("train", "train"), ("test", "t10k")):
        put(folder / f"MNIST/raw/{file}-images-idx3-ubyte", idx(images[part][:, 0]))
        put(folder / f"MNIST/raw/{file}-labels-idx1-ubyte", idx(LABELS[part]))
    return images


def write_usps(folder: Path) -> dict[str, np.ndarray]:
    images = {part: pixels(n, 1, 16, 16) for part, n in SIZES.items()}
    for part, file in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        # torchvision rounds down to a level
        rows = images[part].reshape(SIZES[part], -1) / 127.5 - 1 + 1e-4
        lines = [
            " ".join([str(y + 1), *(f"{i + 1}:{v:.6f}" for i, v in enumerate(row))])
            for y, row in zip(LABELS[part], rows, strict=True)
        ]
        put(folder / "USPS" / file, bz2.compress("\n".join(lines).encode() + b"\n"))
    return images


def write_mnist_m(folder: Path) -> dict[str, np.ndarray]:
    images = {part: pixels(n, 3, 32, 32) for part, n in SIZES.items()}
    for part, xs in images.items():
        (folder / f"mnist_m/mnist_m_{part}").mkdir(parents=True)
        for i, x in enumerate(xs):
            Image.fromarray(x.transpose(1, 2, 0)).save(
                folder / f"mnist_m/mnist_m_{part}/{i:08d}.png"
            )
        lines = [f"{i:08d}.png {y}\n" for i, y in enumerate(LABELS[part])]
        put(folder / f"mnist_m/mnist_m_{part}_labels.txt", "".join(lines).encode())
    return images


def write_svhn(folder: Path, monkeypatch) -> dict[str, np.ndarray]:
    scipy_io = pytest.importorskip("scipy.io")
    images = {part: pixels(n, 3, 32, 32) for part, n in SIZES.items()}
    for part, x in images.items():
        buffer = io.BytesIO()
        y = np.where(LABELS[part] == 0, 10, LABELS[part])[:, None]
        scipy_io.savemat(
            buffer,
            {"X": x.transpose(2, 3, 1, 0), "y": y.astype(float if part == "train" else np.uint8)},
        )
        url, file, _ = SVHN.split_list[part]
        monkeypatch.setitem(
            SVHN.split_list, part, [url, file, put(folder / "SVHN" / file, buffer.getvalue())]
        )
    return images


def test_each_set_is_one_client_or_one_client_per_class(tmp_path, monkeypatch):
    written = [
        write_mnist(tmp_path),
        write_mnist_m(tmp_path),
        write_usps(tmp_path),
        write_svhn(tmp_path, monkeypatch),
    ]
    dataset = hwdigits(str(tmp_path), download=False)
    for part, n in SIZES.items():
        split = getattr(dataset, part)
        np.testing.assert_array_equal(
            split.x, np.concatenate([enlarged(images[part]) for images in written])
        )
        np.testing.assert_array_equal(split.y, np.tile(LABELS[part], 4))
        np.testing.assert_array_equal(split.groups, np.repeat(np.arange(4), n))
    assert dataset.num_classes == 10
    assert dataset.class_names[3] == "3"
    assert isinstance(dataset.train.x, np.memmap)

    shutil.rmtree(tmp_path / "SVHN")  # from here on, the cache is read
    by_class = hwdigits(str(tmp_path), download=False, one_class=True)
    np.testing.assert_array_equal(
        by_class.train.groups, np.repeat(np.arange(4) * 10, 14) + np.tile(LABELS["train"], 4)
    )
    clients = ByGroup()(by_class.train.y, None, groups=by_class.train.groups)
    assert clients.sizes.tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 1, 1] * 4
    assert by_class.test.groups.max() == 39


def test_a_missing_set_is_named_before_the_files_of_mnist_m_are_decoded(tmp_path, monkeypatch):
    """A download has 68,000 of them. No other set takes as long."""
    write_mnist_m(tmp_path)
    monkeypatch.setattr("gcfed.data.sets.hwdigits.decode", lambda *_, **__: pytest.fail("decodes"))
    with pytest.raises(FileNotFoundError, match="usps: a file is missing"):
        hwdigits(str(tmp_path), download=False, sets=["mnist_m", "usps"])


def test_missing_files_are_named_with_their_source(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    sets = ["mnist", "svhn"]
    with pytest.raises(FileNotFoundError, match=r"svhn: a file is .*=true, put the .*ufldl"):
        hwdigits(str(tmp_path), download=False, sets=sets)
    monkeypatch.setitem(SVHN.split_list, "train", [NOWHERE, *SVHN.split_list["train"][1:]])
    with pytest.raises(FileNotFoundError, match=r"svhn: a file is .*refused.*\)\. Put the "):
        hwdigits(str(tmp_path), sets=sets)
    with pytest.raises(FileNotFoundError, match=r"mnist_m: the folder is .*\)\. Put .*yaroslav"):
        hwdigits(str(tmp_path), download=False, sets=["mnist_m"])
    put(tmp_path / "USPS" / "usps.bz2", bz2.compress(b"1 text\n"))
    with pytest.raises(
        FileNotFoundError, match=r"usps: a file is missing or broken .*ntu\.edu\.tw"
    ):
        hwdigits(str(tmp_path), download=False, sets=["usps"])
    with pytest.raises(ValueError, match=r"^sets=.*mnist, mnist_m, usps, svhn, each once"):
        hwdigits(str(tmp_path), sets=["emnist"])
