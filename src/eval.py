"""Test the global model of a checkpoint: ``python src/eval.py ckpt_path=logs/…/checkpoints/last.ckpt``."""

import json

import hydra
from omegaconf import DictConfig

import gcfed.configure  # noqa: F401  (its resolvers, before Hydra composes)
from gcfed.utils.cpu import spin_briefly


@hydra.main(version_base="1.3", config_path="../configs", config_name="eval")
def main(cfg: DictConfig) -> None:
    spin_briefly()
    from gcfed.run import evaluate, one_sentence

    with one_sentence():
        print(json.dumps(evaluate(cfg)))


if __name__ == "__main__":
    main()
