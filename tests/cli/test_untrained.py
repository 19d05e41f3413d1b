"""A run in which no client ever counted ends with a sentence and exit code 1. Its rows stay."""

from conftest import read_rows, type_command

WORDS = (
    "rounds=2",
    "data.limit_train=100",
    "data.limit_test=40",
    "client.epochs=1",
    "model.hidden=[8]",
    "participation.num_clients=8",
)


def test_a_run_without_a_finite_client_fails_after_its_last_round(tmp_path):
    words = (*WORDS, "client.optimizer.lr=1e30", f"paths.output_dir={tmp_path / 'run'}")
    last = type_command(tmp_path, "train.py", *words, code=1).strip().splitlines()[-1]
    assert last.startswith("no client counted in any round")
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert [row["train/nonfinite_clients"] for row in rows] == [5, 5]
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_sweep_goes_on_after_such_a_run(tmp_path):
    words = (*WORDS, "client.optimizer.lr=1e30,0.1", f"paths.log_dir={tmp_path / 'logs'}", "-m")
    printed = type_command(tmp_path, "train.py", *words, code=1)
    assert printed.strip().splitlines()[-1].startswith("no client counted in any round")
    assert len([*(tmp_path / "logs").rglob("summary.json")]) == 2
