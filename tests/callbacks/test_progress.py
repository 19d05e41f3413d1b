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


def test_the_progress_of_a_resumed_run_counts_all_rounds(config, tmp_path, capsys):
    for rounds, more in ((2, ()), (4, ("eval_every=2", "ckpt_path=last"))):
        cfg = config(*FAST, f"rounds={rounds}", *more, folder=tmp_path)
        with open_dict(cfg):
            cfg.callbacks.progress = {"_target_": "gcfed.callbacks.after_round.RoundProgressBar"}
        train(cfg)
    shown = capsys.readouterr().out
    counts = re.findall(r"Round (\d+)/(\d+|\?) ", shown)
    assert {total for _, total in counts} == {"2", "4"}
    assert max(counts) == counts[-1] == ("4", "4")
    assert re.search(r"Round 4/4 \|█+\| .*loss=[\d.]+, acc=[\d.]+", shown)
    assert "Validation" not in shown
