import numpy as np
import pytest

from gcfed.data.sets.cache import MANIFEST, cached


class Build:
    """Fills a cache with images of one value and counts its calls."""

    def __init__(self, value=1):
        self.value = value
        self.calls = 0

    def __call__(self, keep):
        self.calls += 1
        blocks = (np.full((m, 1, 4, 4), self.value, np.uint8) for m in (1, 2, 3))
        keep("train", blocks, np.arange(6) % 3, np.full(6, 7))
        keep("test", np.zeros((2, 1, 4, 4), np.uint8), np.arange(2))
        return 3, "abc"


def check(dataset, value=1):
    assert dataset.name == "toy"
    assert dataset.num_classes == 3
    assert dataset.class_names == ("a", "b", "c")
    np.testing.assert_array_equal(dataset.train.x, np.full((6, 1, 4, 4), value))
    np.testing.assert_array_equal(dataset.train.y, np.arange(6) % 3)
    assert (dataset.train.groups == 7).all()
    assert dataset.test.groups is None


def test_built_once_and_mapped_read_only(tmp_path):
    build = Build()
    for _ in range(3):
        dataset = cached(tmp_path, "toy", build)
        check(dataset)
        assert isinstance(dataset.train.x, np.memmap)
        assert not dataset.train.x.flags.writeable
        assert not isinstance(dataset.train.y, np.memmap)
    assert build.calls == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["toy"]


@pytest.mark.parametrize(
    ("file", "keep"), [("train_x.npy", -1), ("test_y.npy", None), (MANIFEST, 0), (MANIFEST, None)]
)
def test_a_truncated_or_lost_file_is_built_again(tmp_path, caplog, file, keep):
    build = Build()
    cached(tmp_path, "toy", build)
    path = tmp_path / "cache" / "toy" / file
    content = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(content[:keep])
    check(cached(tmp_path, "toy", build))
    check(cached(tmp_path, "toy", build))
    assert build.calls == 2
    assert ("Building the cache" in caplog.text) == (keep is not None or file != MANIFEST)


def test_a_cache_of_another_source_is_built_again(tmp_path):
    cached(tmp_path, "toy", Build(), "2 files")
    check(cached(tmp_path, "toy", Build(5), ""))  # the raw files are gone
    check(cached(tmp_path, "toy", Build(5), "2 files"))
    check(cached(tmp_path, "toy", Build(5), "3 files"), 5)


def test_a_build_within_a_build(tmp_path):
    class Slow(Build):
        def __call__(self, keep):
            info = super().__call__(keep)
            # another process begins later and ends earlier
            self.other = cached(tmp_path, "toy", Build())
            return info

    slow = Slow()
    never = Build()
    check(cached(tmp_path, "toy", slow))
    check(slow.other)
    check(cached(tmp_path, "toy", never))
    assert never.calls == 0
