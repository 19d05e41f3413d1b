"""Files that a run writes: no device is replaced, and what killed processes left is removed."""

import os
import subprocess
import sys

import pytest

from gcfed.utils.files import replacing, scratch


def test_only_regular_files_are_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file"), replacing(pipe):
        pytest.fail("something was written")
    assert pipe.is_fifo()
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with replacing(tmp_path / name) as temporary:
            temporary.write_text(name)
        assert (tmp_path / name).read_text() == name


def test_a_killed_process_leaves_a_folder_that_the_next_one_removes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = "from gcfed.utils.files import scratch; import os; held = scratch(); os.kill(os.getpid(), 9)"
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", killed], env=environment, check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    (tmp_path / "gcfed_mine").mkdir()
    with scratch() as held, scratch() as other:
        assert not left.exists()
        assert {held, other, str(tmp_path / "gcfed_mine")} == {str(path) for path in tmp_path.iterdir()}
