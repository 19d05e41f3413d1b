"""Loggers in the run's own folder, a row a round: ``metrics.csv``, and TensorBoard's events with pictures.

``resume_round`` of each is the last finished round of the checkpoint that the run continues; 0 starts anew.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from gcfed.runs.reading import read_metrics
from gcfed.utils.checked import SettingError, Whole, checked
from gcfed.utils.files import replacing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

#: The charts of the tab Custom Scalars; columns as regular expressions.
CHARTS = {
    "accuracy": ["Multiline", ["^test/acc$", "^val/acc$", "^test/acc_smooth10$", "^test/acc_ema$"]],
    "loss": ["Multiline", ["^test/loss$", "^val/loss$", "^train/loss$"]],
}


@checked
class RoundCSVLogger(Logger):
    """Appends one row a round to ``metrics.csv``; a resumed run drops the rows after its checkpoint.

    A metric that appears for the first time in a later round adds a column to the whole file.
    """

    name = "csv"
    version = ""

    def __init__(self, path: str, resume_round: Whole = 0) -> None:
        super().__init__()
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():  # a device, which would be replaced
            raise SettingError("path", f"={path} is there, and no regular file: name another.")
        self.columns: list[str] = []
        self._resume_round: int | None = resume_round  # until the file has begun

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Begins the file; the resolved config lies beside it."""
        if self._resume_round == 0:
            self.path.unlink(missing_ok=True)
        elif self._resume_round is not None:
            rows = read_metrics(self.path, text=True)
            kept = rows[rows.index.astype(int) <= self._resume_round]
            self._write(list(kept.columns), kept.to_dict("records"))
        self._resume_round = None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "round" not in metrics:
            return
        self.log_hyperparams({})
        if new := [name for name in metrics if name not in self.columns]:
            rows = read_metrics(self.path, text=True).to_dict("records") if self.columns else []
            self._write([*self.columns, *new], rows)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(metrics)

    def _write(self, columns: list[str], rows: list[dict[Any, Any]]) -> None:
        self.columns = columns
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


@checked
class RoundTensorBoardLogger(TensorBoardLogger):
    """Lightning's, in ``save_dir`` itself: one event file, resumed in place, with curves, pictures and the hparams tab.

    A resumed run copies what its file has up to the checkpoint into a new one, which takes its place: of two entries
    that are true of a run as a whole (its hyperparameters, how it ended) TensorBoard would keep the first.

    Args:
        resume_round: last finished round of the checkpoint that the run continues; 0 starts anew.
    """

    def __init__(self, save_dir: str, resume_round: Whole = 0) -> None:
        self._resume_round = resume_round
        # To a TensorBoard that is watching, a new file takes back all that the one before it said.
        super().__init__(save_dir, name="", version="", default_hp_metric=False, purge_step=0)
        self._table: Mapping[str, Any] = {}
        self._end: list[Any] | None = None  # what is said of a run that has come to its end, as one event
        self._closed = False

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """Lightning asks for it when the run has begun, in the process that writes."""
        if self._experiment is None:
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb

            old = sorted(Path(self.log_dir).glob("events.out.tfevents.*"))
            kept = _events(old, self._resume_round) if self._resume_round else []
            writer = super().experiment
            file = writer._get_file_writer()
            table = {key if key == "algorithm" else behind("gc", key): value for key, value in self._table.items()}
            file.add_summary(hparams_pb(table, trial_id=""), 0)  # the same settings are still two runs
            writer.add_custom_scalars({"rounds": CHARTS})
            for event in kept:
                file.event_writer.add_event(event)
            file.flush()
            for path in old:
                path.unlink()
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Keeps the table, one value a column, until events are written."""
        self._table = params

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """One event a round, on disk at once: a run that is killed has all its rounds."""
        columns = {behind("test/", name): float(value) for name, value in metrics.items() if name != "round"}
        self._write([{"tag": tag, "simple_value": value} for tag, value in columns.items()], step)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[str | Path], step: int | None = None) -> None:
        """PNG files, as Lightning's W&B logger takes them."""
        for content in (Path(image).read_bytes() for image in images):
            width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))  # PNG's first chunk
            picture = {"width": width, "height": height, "colorspace": 4, "encoded_image_string": content}
            self._write([{"tag": behind("test/", key), "image": picture}], step)

    @rank_zero_only
    def log_summary(self, metrics: Mapping[str, float], step: int, *, success: bool) -> None:
        """The last figures of a run that has come to its end; ``success`` is false for one that diverged."""
        self.log_metrics(metrics, step)
        self._close(step, success=success)

    @rank_zero_only
    def save(self) -> None:
        """No ``hparams.yaml``: the resolved config lies in the run's folder."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """The file stays open for what :meth:`log_summary` has to say; an error is the end."""
        if status != "failed":
            self._end = self._end or []
        elif self._experiment is not None and not self._closed:
            self._close(None, success=False)

    def _close(self, step: int | None, *, success: bool) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
        content = plugin_data_pb2.HParamsPluginData(session_end_info=plugin_data_pb2.SessionEndInfo(status=status))
        about = metadata.create_summary_metadata(content)
        ending, self._end = self._end or [], None
        ending.append({"tag": metadata.SESSION_END_INFO_TAG, "metadata": about, "tensor": metadata.NULL_TENSOR})
        self._write(ending, step)
        self._closed = True
        self.experiment.close()

    def _write(self, values: list[Any], step: int | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._end is not None:
            self._end += values
        elif not self._closed:
            self.experiment._get_file_writer().add_summary(Summary(value=values), step)
            self.experiment.flush()


def behind(first: str, name: str) -> str:
    """TensorBoard sorts by name: what would stand before the accuracy, or before GC, gets a dot and stands last."""
    return name if name >= first else f"·{name}"


def _events(paths: Iterable[Path], last: int) -> list[Any]:
    """What event files have of the rounds up to the last, once each, without what they say of the run as a whole."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
    from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, SESSION_START_INFO_TAG

    whole = {CONFIG_SUMMARY_TAG, SESSION_START_INFO_TAG, SESSION_END_INFO_TAG}
    kept: dict[Any, Any] = {}
    for path in paths:
        for event in map(Event.FromString, RawEventFileLoader(str(path)).Load()):
            tags = frozenset(value.tag for value in event.summary.value)
            if tags and event.step <= last and tags.isdisjoint(whole):
                kept[event.step, tags] = event
    return list(kept.values())
