"""Units of the inputs before a batch normalisation: equal results, or the tensor is named."""

import pytest
from users_plain import run

WORDS = ("gc=none", "precision=32-true", "rounds=4")
USUAL = {}  # the metrics of a run in another unit, which all tests share


def unit(k):
    """Inputs are 10^k times as large as usual. A batch normalisation starts at a variance of 1."""
    return f"+data.dataset.unit=1e-{k}"


@pytest.mark.parametrize("k", [2, 4, 6, 8, 9, 10, 12, 16, 20, 30])
def test_a_run_in_other_units_is_equal_or_names_the_tensor(config, tmp_path, caplog, k):
    if not USUAL:
        USUAL.update(run(config, tmp_path / "usual", "AnyUnit", *WORDS, unit(3), clients=3).metrics)
    result = run(config, tmp_path / "run", "AnyUnit", *WORDS, unit(k), clients=3)
    assert result.loop.run.counted == (k < 10)
    if result.loop.run.counted:
        assert result.metrics["test/acc"] == USUAL["test/acc"]
        assert result.metrics["test/loss"] == pytest.approx(USUAL["test/loss"], abs=1e-3)
        return
    assert "norm.running_var" in caplog.text
    assert "scale the inputs" in caplog.text
    assert "client.optimizer.lr" not in caplog.text
