"""Run by test_contract.py under ``torch.distributed.run``: trains each algorithm, the cohort dealt to two processes.

Usage: two_processes.py FOLDER CASE…
"""

import sys

import torch
from hydra import compose, initialize_config_dir

import gcfed.configure  # noqa: F401
from gcfed.run import train
from gcfed.utils.resolvers import ROOT

TINY = (
    "model.hidden=[12,8]", "rounds=3", "participation.num_clients=7", "participation.per_round=3", "client.epochs=2",
    "client.batch_size=8", "data.limit_train=150", "data.limit_test=40", "eval_every=3", "callbacks.checkpoint.every=9",
    "precision=64-true",
)  # fmt: skip
QUIET = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2",
         "~callbacks.progress", "~logger.tensorboard", "extras.figures=false")  # fmt: skip


def overrides_of(case):
    """An algorithm; ``+alone``: one client a round, so that one process has none and states change processes."""
    algorithm, _, alone = case.partition("+")
    more = ("participation.per_round=1", "participation.num_clients=2", "rounds=6", "callbacks.checkpoint.every=2")
    return (algorithm, *(more if alone else ()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *cases = sys.argv[1:]
    for case in cases:
        algorithm, *more = overrides_of(case)
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            run = f"paths.output_dir={folder}/{case}"
            train(compose("train", [f"algorithm={algorithm}", *TINY, *QUIET, *more, run]))
