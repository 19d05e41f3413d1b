"""Folders of images: which files are read, and how."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gcfed.data.partition import ByGroup
from gcfed.data.sets.images import image_folder


def write_images(folder: Path, classes: dict[str, int], size=(6, 5), below="more") -> None:
    for c, (name, count) in enumerate(classes.items()):
        for i in range(count):
            path = folder / name / below / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, (100 * c, i, 0)).save(path)
        (folder / name / below / ".hidden.png").write_bytes(b"")
        (folder / name / "notes.txt").write_text("no image")


def test_a_folder_with_a_test_split(tmp_path):
    write_images(tmp_path / "flowers/Train", {"rose": 3, "tulip": 2})  # in upper or lower case
    write_images(tmp_path / "flowers/val", {"rose": 1, "tulip": 1})
    dataset = image_folder(str(tmp_path / "flowers"), str(tmp_path))
    assert dataset.name == "flowers"
    assert dataset.class_names == ("rose", "tulip")
    assert dataset.train.x.shape == (5, 3, 5, 6)
    assert dataset.test.x.shape == (2, 3, 5, 6)
    assert dataset.train.y.tolist() == [0, 0, 0, 1, 1]
    assert dataset.test.y.tolist() == [0, 1]
    corners = [[0, 0, 0], [0, 1, 0], [0, 2, 0], [100, 0, 0], [100, 1, 0]]
    np.testing.assert_array_equal(dataset.train.x[:, :, 0, 0], corners)
    small = image_folder(str(tmp_path / "flowers"), str(tmp_path), size=4)
    assert small.train.x.shape == (5, 3, 4, 4)
    write_images(tmp_path / "flowers/Train", {"rose": 4, "tulip": 2})
    assert len(image_folder(str(tmp_path / "flowers"), str(tmp_path)).train) == 6


def test_a_folder_without_a_test_split_gives_a_part_of_each_class(tmp_path):
    write_images(tmp_path / "flowers", {"rose": 10, "tulip": 20})
    dataset = image_folder(str(tmp_path / "flowers"), str(tmp_path), test=0.2)
    assert np.bincount(dataset.train.y).tolist() == [8, 16]
    assert np.bincount(dataset.test.y).tolist() == [2, 4]
    assert len({(*x[:2, 0, 0],) for split in (dataset.train, dataset.test) for x in split.x}) == 30


def test_one_folder_per_client_makes_natural_clients(tmp_path):
    for name, classes in (("zoe", {"rose": 4, "tulip": 1}), ("bob", {"tulip": 5})):
        write_images(tmp_path / "flowers/train" / name, classes)
    write_images(tmp_path / "flowers/test/carl", {"rose": 1, "tulip": 2})
    dataset = image_folder(str(tmp_path / "flowers"), str(tmp_path), clients=True)
    assert dataset.class_names == ("rose", "tulip")
    assert len(dataset.test) == 3
    assert dataset.train.groups.tolist() == [0] * 5 + [2] * 5  # carl has images to test on only
    assert dataset.train.y.tolist() == [1] * 5 + [0] * 4 + [1]
    clients = ByGroup()(dataset.train.y, None, seed=1, groups=dataset.train.groups)
    assert clients.label_counts(dataset.train.y, 2).tolist() == [[0, 5], [4, 1]]  # bob has no rose
    with pytest.raises(ValueError, match=r"has images of more: .* below a folder for each client"):
        image_folder(str(tmp_path / "flowers/train/zoe"), str(tmp_path), clients=True)


def test_sets_are_splits(tmp_path):
    for part, count in (("training_set", 3), ("test_set", 2)):
        write_images(tmp_path / "pets" / part, {"cats": count, "dogs": count}, below="")
    dataset = image_folder(str(tmp_path / "pets"), str(tmp_path))
    assert dataset.class_names == ("cats", "dogs")
    assert len(dataset.train) == 6
    assert len(dataset.test) == 4


def test_files_that_are_no_images_are_counted_by_reason(tmp_path, caplog):
    write_images(tmp_path / "f", {"rose": 4, "tulip": 4})
    rose = tmp_path / "f" / "rose"
    for name in ("Thumbs.db", "README", "x.heic", "../loose.png"):
        (rose / name).write_bytes(b"")
    for i, suffix in enumerate((".JPG", ".pgm", ".Tif", ".webp", ".gif", ".bmp")):
        Image.new("RGB", (6, 5), (i, 90, 0)).save(rose / f"x{i}{suffix}")
    dataset = image_folder(str(tmp_path / "f"), str(tmp_path), test=0.5)
    assert len(dataset.train) + len(dataset.test) == 14
    loose, odd, hidden = caplog.messages
    assert loose.endswith("f: 1 entry is not read (not in a folder of a class): loose.png")
    assert "5 entries are not read (the name ends in none of .bmp, " in odd
    assert odd.endswith(
        ": rose/README, rose/Thumbs.db, rose/notes.txt, rose/x.heic, tulip/notes.txt"
    )
    assert "2 entries are not read (hidden): rose/more/.hidden.png" in hidden


def test_what_the_arrays_lack_is_counted_in_each_run(tmp_path, caplog):
    """Alpha channels, later frames and the lower bits of 16; an opaque alpha channel is no loss."""
    picture = Image.new("RGB", (6, 5), (9, 90, 0))
    for name in ("rose", "tulip"):
        folder = tmp_path / "f" / name
        folder.mkdir(parents=True)
        picture.save(folder / "plain.png")
        picture.convert("RGBA").save(folder / "opaque.png")
    Image.new("RGBA", (6, 5), (9, 90, 0, 200)).save(tmp_path / "f/rose/clear.png")
    frames = {"save_all": True, "append_images": [Image.new("RGB", (6, 5))]}
    for suffix in ("gif", "webp", "tiff", "png"):
        picture.save(tmp_path / f"f/tulip/frames.{suffix}", **frames)
    (tmp_path / "f/rose/deep.ppm").write_bytes(b"P6 6 5 65535\n" + bytes(6 * 5 * 6))
    for _ in range(2):  # decoded, then from the cache
        caplog.clear()
        image_folder(str(tmp_path / "f"), str(tmp_path), test=0.2)
        text = "\n".join(caplog.messages)
        counts = {}
        for count, loss in re.findall(r"images of \w+: (\d+) (are transparent|have [\w ]+),", text):
            counts[loss] = counts.get(loss, 0) + int(count)
        assert counts == {
            "are transparent": 1,
            "have several frames": 4,
            "have 16 bits a channel": 1,
        }
        assert "opaque" not in text


def test_classes_and_clients_are_named(tmp_path, caplog):
    caplog.set_level("INFO")
    write_images(tmp_path / "f/bob", {"rose": 4, "Tulip": 4})
    write_images(tmp_path / "f/zoe", {"rose": 4, "tulip": 4, "lily ": 4})
    image_folder(str(tmp_path / "f"), str(tmp_path), clients=True)
    text = "\n".join(caplog.messages)
    assert "f: 4 classes: Tulip, lily, rose, tulip\n" in text
    assert text.endswith("f: 2 clients: bob, zoe")
    assert "1 of the classes nearly equal another one, such as 'Tulip' and 'tulip'" in text


def test_images_are_turned_upright_and_converted_to_rgb(tmp_path):
    """Each of the eight EXIF orientations is undone. Only the first frame is read."""
    picture = np.zeros((6, 8, 3), np.uint8)
    picture[:3, :4] = 255, 0, 0
    undo = {
        1: lambda x: x,
        2: np.fliplr,
        3: lambda x: np.rot90(x, 2),
        4: np.flipud,
        5: lambda x: x.transpose(1, 0, 2),
        6: np.rot90,
        7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
        8: lambda x: np.rot90(x, 3),
    }
    for name in ("rose", "tulip"):
        (tmp_path / "f" / name).mkdir(parents=True)
        for orientation, turned in undo.items():
            image = Image.fromarray(np.ascontiguousarray(turned(picture)))
            exif = image.getexif()
            exif[0x112] = orientation
            image.save(tmp_path / "f" / name / f"{orientation}.png", exif=exif)
        image = Image.fromarray(picture)
        image.convert("RGBA").save(tmp_path / "f" / name / "clear.png")
        image.convert("P").save(
            tmp_path / "f" / name / "palette.png", transparency=bytes(range(256))
        )
        image.save(
            tmp_path / "f" / name / "frames.gif",
            save_all=True,
            append_images=[Image.new("RGB", (8, 6))],
        )
    dataset = image_folder(str(tmp_path / "f"), str(tmp_path), test=0.5)
    for split in (dataset.train, dataset.test):
        assert (split.x == picture.transpose(2, 0, 1)).all()


def test_invalid_folders_are_named(tmp_path):
    def refused(words, error=ValueError, root=tmp_path / "flowers"):
        with pytest.raises(error, match=words):
            image_folder(str(root), str(tmp_path))

    refused(r"data\.root=.*flowers is no folder: give the one", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match=r"data\.root=null is no folder"):
        image_folder(None, str(tmp_path))
    write_images(tmp_path / "flowers/test", {"rose": 2, "lily": 2})
    refused("flowers has a folder test, but none to train on: call it train")
    write_images(tmp_path / "flowers/train", {"rose": 2, "tulip": 2})
    refused("the test split has no image of tulip: add one, or take the folder of tests away")
    write_images(tmp_path / "flowers/test", {"tulip": 2})
    refused("the training split has no image of lily: add one")
    shutil.rmtree(tmp_path / "flowers/test/tulip")
    (tmp_path / "flowers/test/lily").rename(tmp_path / "flowers/test/tulip")
    write_images(tmp_path / "flowers/test", {"rose": 2}, size=(3, 3))
    refused(
        r"rose/more/0\.png is 3×3, .*|0\.png is 6×5.* 3×3: give all one size, as by data\.size=64"
    )
    Image.new("I;16", (6, 5)).save(tmp_path / "flowers/train/tulip/more/0.png")
    refused(r"tulip/more/0\.png is no readable .*Pillow's mode I;16 has more than 8")
