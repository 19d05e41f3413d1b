"""When ``partition.png`` is drawn: once, by the first process, where it is wanted and not there yet."""

from types import SimpleNamespace

import pytest

from gcfed.callbacks.after_round import PartitionPicture


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("rounds", "there"), [(0, False), (0, True), (2, False), (2, True)])
def test_it_is_drawn_where_it_is_wanted_and_not_there(tmp_path, monkeypatch, wanted, first, rounds, there):
    """One that is there in a run that begins is of another run."""
    drawn, shown = [], []
    monkeypatch.setattr("gcfed.plots.pictures.draw_partition", lambda *about: drawn.append(about) or tmp_path / "a.png")
    monkeypatch.setattr("gcfed.callbacks.after_round.show", lambda *about: shown.append(about))
    if there:
        (tmp_path / "partition.png").touch()
    trainer = SimpleNamespace(global_step=rounds, is_global_zero=first, datamodule="data", loggers=["logger"])
    callback = PartitionPicture(str(tmp_path), wanted)
    callback.on_train_start(trainer)
    for _ in range(2):
        callback.after_round(trainer, {})
    times = int(wanted and first and not (rounds and there))
    assert drawn == [(tmp_path, "data")] * times
    assert shown == [(["logger"], "partition", tmp_path / "a.png", 0)] * times
