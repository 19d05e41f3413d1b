"""Train: ``python src/train.py experiment=cifar10_cnn_gcfed seed=2``; every key is in ``configs/``."""

import hydra
from omegaconf import DictConfig

import gcfed.configure  # noqa: F401  (its resolvers, before Hydra composes)
from gcfed.utils.cpu import spin_briefly


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    spin_briefly()
    from gcfed.run import one_sentence, train  # torch and lightning: not needed for --help and --cfg

    with one_sentence():
        result = train(cfg)
    return result.metrics.get(cfg.optimized_metric) if cfg.optimized_metric else None


if __name__ == "__main__":
    main()
