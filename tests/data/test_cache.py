import json

import numpy as np
import pytest

from gcfed.data.sets.files import MANIFEST, cached


class Build:
    """Fills a cache with images of one value and counts how often it had to."""

    def __init__(self, value=1, n=6):
        self.value, self.n, self.calls = value, n, 0

    def __call__(self, keep):
        self.calls += 1
        blocks = (np.full((m, 1, 4, 4), self.value, np.uint8) for m in (1, 2, self.n - 3))
        keep("train", blocks, np.arange(self.n) % 3, np.full(self.n, 7))
        keep("test", np.zeros((2, 1, 4, 4), np.uint8), np.arange(2))
        return 3, "abc"


def check(dataset, value=1, n=6):
    assert (dataset.name, dataset.num_classes, dataset.class_names) == ("toy", 3, ("a", "b", "c"))
    assert dataset.train.x.shape == (n, 1, 4, 4)
    assert (dataset.train.x == value).all()
    np.testing.assert_array_equal(dataset.train.y, np.arange(n) % 3)
    assert (dataset.train.groups == 7).all()
    assert dataset.test.groups is None


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_built_once_and_mapped_read_only(tmp_path):
    build = Build()
    for _ in range(3):
        dataset = cached(tmp_path, "toy", build)
        check(dataset)
        assert isinstance(dataset.train.x, np.memmap)
        assert not dataset.train.x.flags.writeable
        assert not isinstance(dataset.train.y, np.memmap)
    assert build.calls == 1
    arrays = ["test_x.npy", "test_y.npy", "train_groups.npy", "train_x.npy", "train_y.npy"]
    assert names(tmp_path / "cache" / "toy") == [MANIFEST, *arrays]


@pytest.mark.parametrize("file", ["train_x.npy", "test_y.npy", MANIFEST])
def test_a_truncated_file_is_built_again(tmp_path, caplog, file):
    build = Build()
    cached(tmp_path, "toy", build)
    path = tmp_path / "cache" / "toy" / file
    path.write_bytes(path.read_bytes()[:-1])
    check(cached(tmp_path, "toy", build))
    check(cached(tmp_path, "toy", build))
    assert build.calls == 2
    assert "Building the cache" in caplog.text
    assert file in caplog.text or file == MANIFEST


@pytest.mark.parametrize("change", ["lost", "other shape", "other format", "zeroed", "one bit", "no manifest"])
def test_a_cache_that_does_not_match_its_manifest_is_built_again(tmp_path, caplog, change):
    build = Build()
    cached(tmp_path, "toy", build)
    folder = tmp_path / "cache" / "toy"
    if change == "lost":
        (folder / "train_x.npy").unlink()
    elif change == "other shape":
        np.save(folder / "train_x.npy", np.zeros((6, 1, 2, 8), np.uint8))
    elif change == "zeroed":
        np.load(folder / "train_x.npy", mmap_mode="r+")[:] = 0
    elif change == "one bit":
        np.load(folder / "test_y.npy", mmap_mode="r+")[1] ^= 1
    elif change == "no manifest":
        (folder / MANIFEST).write_text('{"format": 1, "source": "", "arrays": 3}')
    else:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 0}))
    check(cached(tmp_path, "toy", build))
    assert build.calls == 2
    assert f"Building the cache {folder} again: " in caplog.text
    check(cached(tmp_path, "toy", build))
    assert build.calls == 2


def test_a_killed_build_leaves_no_cache(tmp_path):
    def killed(keep):
        keep("train", np.zeros((6, 1, 4, 4), np.uint8), np.arange(6))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "toy", killed)
    assert names(tmp_path / "cache" / "toy") == []
    check(cached(tmp_path, "toy", Build()))


def test_a_build_within_a_build(tmp_path):
    class Slow(Build):
        def __call__(self, keep):
            info = super().__call__(keep)
            self.other = cached(tmp_path, "toy", Build())  # the other process begins later and ends earlier
            return info

    slow = Slow()
    mine = cached(tmp_path, "toy", slow)
    check(mine)
    check(slow.other)
    never = Build()
    check(cached(tmp_path, "toy", never))
    assert never.calls == 0
    assert not [name for name in names(tmp_path / "cache" / "toy") if name.startswith(".")]
