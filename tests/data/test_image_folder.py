"""Folders of images: which files are read, and how; what is said of the others."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_datasets import png_of

from gcfed.data.partition import ByGroup
from gcfed.data.sets.images import image_folder


def write_images(folder: Path, classes: dict[str, int], size=(6, 5)) -> None:
    for c, (name, count) in enumerate(classes.items()):
        for i in range(count):
            path = folder / name / "more" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, (100 * c, i, 0)).save(path)
        (folder / name / "more" / ".hidden.png").write_bytes(b"")
        (folder / name / "notes.txt").write_text("no image")


def test_a_folder_with_a_test_split(tmp_path):
    write_images(tmp_path / "flowers/train", {"rose": 3, "tulip": 2})
    write_images(tmp_path / "flowers/val", {"rose": 1, "tulip": 1})
    dataset = image_folder(str(tmp_path / "flowers"), str(tmp_path))
    assert (dataset.name, dataset.class_names) == ("flowers", ("rose", "tulip"))
    assert (dataset.train.x.shape, dataset.test.x.shape) == ((5, 3, 5, 6), (2, 3, 5, 6))
    assert (dataset.train.y.tolist(), dataset.test.y.tolist()) == ([0, 0, 0, 1, 1], [0, 1])
    corners = [[0, 0, 0], [0, 1, 0], [0, 2, 0], [100, 0, 0], [100, 1, 0]]
    np.testing.assert_array_equal(dataset.train.x[:, :, 0, 0], corners)
    small = image_folder(str(tmp_path / "flowers"), str(tmp_path), size=4)
    assert small.train.x.shape == (5, 3, 4, 4)
    write_images(tmp_path / "flowers/train", {"rose": 4, "tulip": 2})
    assert len(image_folder(str(tmp_path / "flowers"), str(tmp_path)).train) == 6
    (tmp_path / "flowers/train/tulip").rename(tmp_path / "flowers/train/aster")  # as large and as old as before
    (tmp_path / "flowers/val/tulip").rename(tmp_path / "flowers/val/aster")
    renamed = image_folder(str(tmp_path / "flowers"), str(tmp_path))
    assert (renamed.class_names, renamed.train.y.tolist()) == (("aster", "rose"), [0, 0, 1, 1, 1, 1])


def test_a_folder_without_a_test_split_gives_a_part_of_each_class(tmp_path):
    write_images(tmp_path / "flowers", {"rose": 10, "tulip": 20})
    dataset = image_folder(str(tmp_path / "flowers"), str(tmp_path), test=0.2)
    assert (np.bincount(dataset.train.y).tolist(), np.bincount(dataset.test.y).tolist()) == ([8, 16], [2, 4])
    seen = {(int(x[0, 0, 0]), int(x[1, 0, 0])) for split in (dataset.train, dataset.test) for x in split.x}
    assert len(seen) == 30


def test_a_folder_a_client_makes_natural_clients(tmp_path, caplog):
    for name, classes in (("zoe", {"rose": 4, "tulip": 1}), ("bob", {"tulip": 5})):
        write_images(tmp_path / "flowers/train" / name, classes)
    write_images(tmp_path / "flowers/test/carl", {"rose": 1, "tulip": 2})
    dataset = image_folder(str(tmp_path / "flowers"), str(tmp_path), clients=True)
    assert (dataset.class_names, len(dataset.test)) == (("rose", "tulip"), 3)
    assert dataset.train.groups.tolist() == [0] * 5 + [1] * 5
    assert dataset.train.y.tolist() == [1] * 5 + [0] * 4 + [1]
    whole = image_folder(str(tmp_path / "flowers/train"), str(tmp_path), test=0.5, clients=True)
    assert (np.bincount(whole.train.y).tolist(), np.bincount(whole.test.y).tolist()) == ([2, 3], [2, 3])
    clients = ByGroup()(whole.train.y, None, seed=1, groups=whole.train.groups)
    assert clients.label_counts(whole.train.y, 2).sum(0).tolist() == [2, 3]
    assert clients.label_counts(whole.train.y, 2)[0, 0] == 0  # bob has no rose
    assert "groups" not in caplog.text
    for i in range(4):
        write_images(tmp_path / f"small/{i}", {"rose" if i % 2 else "tulip": 1})
    assert len(image_folder(str(tmp_path / "small"), str(tmp_path), test=0.5, clients=True).train) == 2
    assert "small: 2 of 4 groups have all their samples in the test split" in caplog.text
    with pytest.raises(ValueError, match=r"has folders for more, .* below one for each client"):
        image_folder(str(tmp_path / "flowers/train/zoe"), str(tmp_path), clients=True)


def pictures(folder: Path) -> Path:
    """Two classes of four red images, eight wide and six high."""
    for name in ("rose", "tulip"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(4):
            Image.new("RGB", (8, 6), (200, i, 0)).save(folder / name / f"{i}.png")
    return folder


KINDS = {
    ".jfif": "JPEG", ".jpe": "JPEG", ".JPG": "JPEG", ".jp2": "JPEG2000", ".apng": "PNG", ".pgm": "PPM", ".Tif": "TIFF",
    ".dib": "DIB", ".tga": "TGA", ".webp": "WEBP", ".qoi": "QOI", ".GIF": "GIF",
}  # fmt: skip


def test_images_of_all_suffixes_are_read_and_the_cache_notices(tmp_path, caplog):
    folder = pictures(tmp_path / "f")
    assert len(image_folder(str(folder), str(tmp_path), test=0.5).train) == 4
    for suffix, kind in KINDS.items():
        for name in ("rose", "tulip"):
            Image.new("RGB", (8, 6), (0, 90, 0)).save(folder / name / f"x{suffix}", kind)
    dataset = image_folder(str(folder), str(tmp_path), test=0.5)
    assert len(dataset.train) + len(dataset.test) == 8 + 2 * len(KINDS)
    assert "files not read" not in caplog.text


def test_what_is_no_image_is_counted_in_one_line(tmp_path, caplog):
    folder = pictures(tmp_path / "f")
    rose = folder / "rose"
    for name in ("notes.txt", "more.txt", "._0.png", "Thumbs.db", "README", "x.heic", "../loose.png", "../.DS_Store"):
        (rose / name).write_bytes(b"")
    for name, there in (("loop", folder), ("nowhere.png", rose / "no")):
        (rose / name).symlink_to(there)
    (rose / ".ipynb_checkpoints").mkdir()
    (rose / ".ipynb_checkpoints" / "0-checkpoint.png").write_bytes((rose / "0.png").read_bytes())
    (rose / "linked.png").symlink_to(rose / "0.png")
    for _ in range(2):  # from the cache too
        caplog.clear()
        dataset = image_folder(str(folder), str(tmp_path), test=0.5)
        assert len(dataset.train) + len(dataset.test) == 9
        (line,) = caplog.messages
        assert line.startswith(f"{folder}: files not read")
        assert line.endswith(
            ": 11 (.DS_Store, loose.png, rose/._0.png, rose/.ipynb_checkpoints/0-checkpoint.png, rose/README, …)"
        )


def test_images_are_upright(tmp_path):
    """Of the eight orientations that a camera writes down; a cache of the time when they were not is left alone."""
    picture = np.zeros((6, 8, 3), np.uint8)
    picture[:3, :4] = 250, 0, 0
    undo = {
        1: lambda x: x, 2: np.fliplr, 3: lambda x: np.rot90(x, 2), 4: np.flipud, 5: lambda x: x.transpose(1, 0, 2),
        6: np.rot90, 7: lambda x: np.rot90(x, 2).transpose(1, 0, 2), 8: lambda x: np.rot90(x, 3),
    }  # fmt: skip
    for orientation, turned in undo.items():
        for name in ("rose", "tulip"):
            path = tmp_path / "f" / name / f"{orientation}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(np.ascontiguousarray(turned(picture)))
            exif = image.getexif()
            exif[0x112] = orientation
            image.save(path, exif=exif)
    dataset = image_folder(str(tmp_path / "f"), str(tmp_path), test=0.5)
    former = hashlib.sha256(f"{(tmp_path / 'f').resolve()} None 0.5".encode()).hexdigest()[:12]
    assert [path.name for path in (tmp_path / "cache").iterdir()] != [f"image_folder_{former}"]
    assert (dataset.train.x == picture.transpose(2, 0, 1)).all()


def test_what_is_lost_of_images_is_told_in_one_line_also_from_the_cache(tmp_path, caplog):
    folder = pictures(tmp_path / "f")
    rose, red = folder / "rose", Image.new("RGB", (8, 6), (200, 0, 0))
    red.convert("RGBA").save(rose / "opaque.png")
    clear = red.convert("RGBA")
    clear.putpixel((2, 2), (9, 9, 9, 0))
    clear.save(rose / "clear.png")
    clear.convert("LA").save(rose / "grey.png")
    red.convert("P").save(rose / "palette.png", transparency=bytes(range(256)))
    red.convert("CMYK").save(rose / "print.jpg")
    for suffix in (".gif", ".tif", ".png", ".webp"):
        others = [Image.new("RGB", (8, 6), (0, 0, 200))]
        red.save(rose / f"frames{suffix}", save_all=True, append_images=others, lossless=True)
    for _ in range(2):
        caplog.clear()
        dataset = image_folder(str(folder), str(tmp_path), test=0.1)
        (line,) = caplog.messages
        assert line.startswith(f"{folder}: images are kept in plain colours, which loses: ")
        assert line.endswith("loses: frames but the first of 4, transparency of 3, colours of CMYK of 1")
    assert (dataset.train.x[:, 2, 0, 0] < 100).all()  # no blue one: the first frames


@pytest.mark.parametrize("lacking", [[], ["site2/tulip"]])
def test_clients_that_are_forgotten_are_noticed(tmp_path, lacking):
    """Else they would be the classes."""
    for site in ("site1", "site2", "site3"):
        pictures(tmp_path / "f" / site)
    for place in lacking:
        shutil.rmtree(tmp_path / "f" / place)
    for root, places in ((tmp_path / "f", tmp_path / "f"), (tmp_path / "g", tmp_path / "g" / "train")):
        if root.name == "g":
            (tmp_path / "f").rename(tmp_path / "train")
            (tmp_path / "g").mkdir()
            (tmp_path / "train").rename(tmp_path / "g" / "train")
        with pytest.raises(ValueError, match=rf"site1, site2, site3 of {places} share folders called rose, tulip\. If"):
            image_folder(str(root), str(tmp_path))
        assert image_folder(str(root), str(tmp_path), clients=True).class_names == ("rose", "tulip")
        assert image_folder(str(root), str(tmp_path), clients=False).class_names == ("site1", "site2", "site3")


def test_splits_are_known_by_their_names_whatever_their_case(tmp_path, caplog):
    for i, (train, test) in enumerate((("Train", "TEST"), ("training", "Testing"), ("train", "val"))):
        for name in (train, test):
            pictures(tmp_path / str(i) / name)
        dataset = image_folder(str(tmp_path / str(i)), str(tmp_path))
        assert (dataset.class_names, len(dataset.train), len(dataset.test)) == (("rose", "tulip"), 8, 8)
    assert not caplog.text
    pictures(tmp_path / "2" / "test")
    image_folder(str(tmp_path / "2"), str(tmp_path))
    assert ": 8 (val/rose/0.png, " in caplog.text
    pictures(tmp_path / "3")
    pictures(tmp_path / "3" / "Val")
    with pytest.raises(ValueError, match=r"3 has a folder Val, and none to train on: call it train"):
        image_folder(str(tmp_path / "3"), str(tmp_path))


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_images_of_more_than_eight_bits_are_named(tmp_path, mode):
    folder = pictures(tmp_path / "f")
    Image.new(mode, (8, 6)).save(folder / "rose" / "deep.tif")
    with pytest.raises(ValueError, match=rf"rose/deep\.tif is no readable .*Pillow's mode {mode} has more than 8"):
        image_folder(str(folder), str(tmp_path))


def test_folders_that_do_not_fit_are_named(tmp_path):
    def refused(words, error=ValueError, root=tmp_path / "flowers"):
        with pytest.raises(error, match=words):
            image_folder(str(root), str(tmp_path))

    refused(r"data\.root=.*flowers is no folder: give the one", FileNotFoundError)
    write_images(tmp_path / "flowers/train", {"rose": 2})
    refused("has folders for rose, and to test for rose: it must have one .* at least two classes")
    write_images(tmp_path / "flowers/train", {"rose": 2, "tulip": 2})
    write_images(tmp_path / "flowers/test", {"rose": 2, "lily": 2})
    refused("has folders for rose, tulip, and to test for lily, rose")
    (tmp_path / "flowers/test/lily").rename(tmp_path / "flowers/test/tulip")
    write_images(tmp_path / "flowers/test", {"rose": 2}, size=(3, 3))
    refused(r"rose/more/0\.png is 3×3, .*|0\.png is 6×5.* 3×3: give all one size, as by data\.size=64")
    (tmp_path / "flowers/train/tulip/more/0.png").write_bytes(png_of(2**15, 2**15))
    refused(r"tulip/more/0\.png is no readable image .*decompression bomb.*: put a sound one")
    for path in (tmp_path / "flowers/train/tulip/more").glob("*.png"):
        path.unlink()
    refused("tulip holds no image: add some")
