"""What a user sees while a run goes on."""

import os
import pty
import re
import termios
import threading
from contextlib import contextmanager, redirect_stdout, suppress

from omegaconf import open_dict

from gcfed.callbacks.after_round import RoundProgressBar
from gcfed.run import train

FAST = ("participation.num_clients=8", "client.epochs=1", "data.limit_train=100", "data.limit_test=40")


def run(config, folder, *overrides, seconds=5):
    cfg = config(*FAST, *overrides, folder=folder)
    with open_dict(cfg):
        cfg.callbacks.progress = {"_target_": f"{RoundProgressBar.__module__}.RoundProgressBar", "seconds": seconds}
    return train(cfg)


@contextmanager
def terminal():
    """Standard output is a terminal for a while; yields a list of what it shows, complete at the end."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    shown: list[str] = []

    def read():
        with suppress(OSError):  # how Linux says that nobody writes any more
            while data := os.read(ours, 1000):  # nothing at the end, on a Mac
                shown.append(data.decode(errors="replace"))

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(theirs, "w") as stream, redirect_stdout(stream):
        yield shown
    thread.join()
    os.close(ours)


def test_a_resumed_run_knows_its_rounds(config, tmp_path):
    with terminal() as shown:
        run(config, tmp_path, "rounds=2")
        run(config, tmp_path, "rounds=4", "eval_every=2", "ckpt_path=last")
    counts = re.findall(r"(\d+)/(\d+|\?) \[", "".join(shown))
    assert counts[0] == ("0", "2")
    assert ("2", "4") in counts
    assert counts[-1] == ("4", "4")
    assert {total for _, total in counts} == {"2", "4"}
    assert re.search(r"Round 100%\|█+\| 4/4 .*loss=[\d.]+, acc=[\d.]+", "".join(shown))


def test_elsewhere_it_prints_lines(config, tmp_path, capsys):
    run(config, tmp_path / "a", "rounds=3")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Round")]
    assert re.fullmatch(r"Round 3/3 \[00:\d\d<00:00, .+round.*, loss=[\d.]+, acc=[\d.]+\]", line)
    run(config, tmp_path / "b", "rounds=3", seconds=0)
    assert "\r" not in (printed := capsys.readouterr().out)
    assert len([line for line in printed.splitlines() if line.startswith("Round")]) == 3
