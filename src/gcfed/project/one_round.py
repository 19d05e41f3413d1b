"""The experiment composes, and trains for one round."""

from pathlib import Path

import gcfed

CONF = Path(__file__).parent / "conf"


def test_the_first_experiment_trains_one_round(tmp_path):
    cfg = gcfed.configure("experiment=first", "rounds=1", config_dir=CONF, folder=tmp_path / "run")
    result = gcfed.train(cfg, quiet=True)
    assert result.frame["test/acc"].between(0, 1).all()
    assert type(result.model).__name__ == "Net"
