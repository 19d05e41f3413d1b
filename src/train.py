"""Train: ``python src/train.py experiment=cifar10_cnn_gcfed seed=2``; every key is
in ``configs/``.
"""

from gcfed.commands import train

if __name__ == "__main__":
    train()
