"""One process at a time has a lock, in whatever order holders leave and others come."""

import fcntl
import os
import socket
from contextlib import ExitStack

import pytest

from gcfed.folders.lock import lock_run, locked
from gcfed.utils.refusal import Refusal

ME = f"process {os.getpid()} on {socket.gethostname()}"


def before_the_next_lock(monkeypatch, action):
    """Calls ``action`` once between the opening of the next lock file and its lock."""
    flock = fcntl.flock
    waiting = [action]

    def lock_after_action(file, operation):
        if operation & fcntl.LOCK_EX and waiting:
            waiting.pop()()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_action)


def test_a_second_process_is_told_the_holder(tmp_path):
    path = tmp_path / "a" / ".lock"
    with locked(path) as holder, locked(path) as other:
        assert holder == ""
        assert other == ME
    assert not path.exists()


def test_a_holder_that_ends_meanwhile_keeps_nobody_out(tmp_path, monkeypatch):
    """It deletes its file after the next process has opened it."""
    path = tmp_path / ".lock"
    first = ExitStack()
    assert first.enter_context(locked(path)) == ""
    before_the_next_lock(monkeypatch, first.close)
    with locked(path) as holder:
        assert holder == ""
        with locked(path) as other:
            assert other == ME
    assert not path.exists()


def test_a_run_that_is_refused_meanwhile_may_delete_the_folder(tmp_path, monkeypatch):
    """Its folder is empty, so it goes with its lock file, which the next run has opened."""
    folder = tmp_path / "run"
    first = ExitStack()
    first.enter_context(lock_run(folder))
    before_the_next_lock(monkeypatch, first.close)
    with lock_run(folder):
        (folder / "config.yaml").touch()
    assert [*folder.iterdir()] == [folder / "config.yaml"]


def test_a_lock_on_a_deleted_file_is_none(tmp_path, monkeypatch):
    """The holder ends, and a third process takes the lock before the second one does."""
    path = tmp_path / ".lock"
    first = ExitStack()
    third = ExitStack()
    first.enter_context(locked(path))

    def end_and_replace():
        first.close()
        assert third.enter_context(locked(path)) == ""

    before_the_next_lock(monkeypatch, end_and_replace)
    with locked(path) as holder:
        assert holder == ME
    assert path.exists()
    third.close()


def test_a_folder_in_use_is_refused_and_stays(tmp_path):
    with lock_run(tmp_path / "run"):
        with pytest.raises(Refusal, match=f"is in use by {ME}"), lock_run(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / ".lock").is_file()
    assert not (tmp_path / "run").exists()
