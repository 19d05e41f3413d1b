"""Test the global model of a checkpoint: ``python src/eval.py
ckpt_path=logs/…/checkpoints/last.ckpt``.
"""

from gcfed.commands import evaluate

if __name__ == "__main__":
    evaluate()
