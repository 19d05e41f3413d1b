"""The progress bar."""

import re

from omegaconf import open_dict

from gcfed.run import train

FAST = (
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
)


BAR = {"_target_": "gcfed.callbacks.after_round.RoundProgressBar"}


def test_a_file_gets_a_line_for_each_tenth_of_the_rounds(config, tmp_path, capsys):
    cfg = config(*FAST, "rounds=25", "client.steps=1", "client.epochs=null", folder=tmp_path)
    with open_dict(cfg):
        cfg.callbacks.progress = BAR
    train(cfg)
    shown = capsys.readouterr().out
    assert "\r" not in shown
    lines = re.findall(r"^Round (\d+)/25 \[.*loss=[\d.]+, acc=[\d.]+\]$", shown, re.MULTILINE)
    assert [int(line) for line in lines] == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]


def test_the_progress_of_a_resumed_run_counts_all_rounds(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for rounds, more in ((2, ()), (4, ("eval_every=2", "ckpt_path=last"))):
        cfg = config(*FAST, f"rounds={rounds}", *more, folder=tmp_path)
        with open_dict(cfg):
            cfg.callbacks.progress = BAR
        train(cfg)
    shown = capsys.readouterr().out
    counts = re.findall(r"Round (\d+)/(\d+|\?) ", shown)
    assert {total for _, total in counts} == {"2", "4"}
    assert max(counts) == counts[-1] == ("4", "4")
    assert re.search(r"Round 4/4 \|█+\| .*loss=[\d.]+, acc=[\d.]+", shown)
    assert "Validation" not in shown
