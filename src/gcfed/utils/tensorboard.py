"""TensorBoard in the run's own folder: curves, hyperparameters, pictures; resumed in place."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "events.out.tfevents.*"
FRAME = ".frame"


class RoundTensorBoardLogger(TensorBoardLogger):
    """Writes to ``<save_dir>/tensorboard``: every entry of a round's row at its round, pictures, and the hparams tab.

    A resumed run hides the rounds after its checkpoint, a run that starts anew removes the old one's events. What
    frames the curves (hyperparameters before the first round; how it ended, its last figures after the last) lies in
    event files of its own, which the next start replaces: of two such entries TensorBoard would keep the first. No
    experiment is declared, since TensorBoard takes the first that it meets for all runs: so it finds the columns in
    the runs themselves, those that differ in front.

    Args:
        save_dir: the run's folder.
        resume_round: last finished round of the checkpoint that the run continues; 0 starts anew.
    """

    def __init__(self, save_dir: str, resume_round: int = 0) -> None:
        # A purge from the first round on, too: TensorBoard heeds only the second of a run.
        super().__init__(save_dir, name="", version="tensorboard", default_hp_metric=False, purge_step=resume_round + 1)
        self._resume_round = resume_round
        self._table: dict[str, Any] = {}
        self._finished = False

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """Lightning asks for it when the run has begun, in the process that writes."""
        if self._experiment is None:
            for old in Path(self.log_dir).glob(EVENTS + (FRAME if self._resume_round else "")):
                old.unlink()
            self._write_frame(_session_start(self._table), 0)
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Keeps the table, one value a column, until events are written."""
        self._table = dict(vars(params) if isinstance(params, Namespace) else params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """One event a round, on disk at once: a run that is killed has all its rounds."""
        self._write(_scalars(metrics), step)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[str | Path], step: int | None = None) -> None:
        """PNG files, as Lightning's W&B logger takes them."""
        self._write(_pictures(key, [Path(image) for image in images]), step)

    @rank_zero_only
    def log_summary(self, metrics: Mapping[str, float], step: int, *, success: bool) -> None:
        """The last figures of a run that has come to its end; ``success`` is false for one that diverged."""
        self._write(_merged(_scalars(metrics), _session_end(success=success)), step)

    @rank_zero_only
    def save(self) -> None:
        """No ``hparams.yaml``: the resolved config lies in the run's folder."""
        if self._experiment is not None:
            self._experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is None or self._finished:
            return
        super().finalize(status)
        self._finished = True
        if status == "failed":
            self._write(_session_end(success=False), None)

    def _write(self, summary: Summary, step: int | None) -> None:
        if self._finished:
            self._write_frame(summary, step)
        else:
            self.experiment._get_file_writer().add_summary(summary, step)
            self.experiment.flush()

    def _write_frame(self, summary: Summary, step: int | None) -> None:
        """An event file of its own. Files are read by name: the end's must come behind those of the same second."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder, now = Path(self.log_dir), time.time()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(now) + self._finished:010d}.{time.time_ns()}{FRAME}"
        with (folder / name).open("wb") as file:
            writer = RecordWriter(file)
            for event in (
                Event(wall_time=now, file_version="brain.Event:2"),
                Event(wall_time=now, step=step, summary=summary),
            ):
                writer.write(event.SerializeToString())
            writer.flush()


# TensorBoard's own formats. Its modules are heavy: they are imported where events are written.
def _scalars(values: Mapping[str, Any]) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()])


def _pictures(tag: str, paths: Sequence[Path]) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary()
    for i, path in enumerate(paths):
        content = path.read_bytes()
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))  # PNG's first chunk
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=content)
        summary.value.add(tag=tag if len(paths) == 1 else f"{tag}/{i}", image=image)
    return summary


def _session_start(table: Mapping[str, bool | int | float | str]) -> Summary:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    return hparams_pb(dict(table), trial_id="")  # runs of the same settings are still two


def _session_end(*, success: bool) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
    content = plugin_data_pb2.HParamsPluginData(session_end_info=plugin_data_pb2.SessionEndInfo(status=status))
    about = metadata.create_summary_metadata(content)
    return Summary(
        value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)]
    )


def _merged(*summaries: Summary) -> Summary:
    first, *others = summaries
    for other in others:
        first.MergeFrom(other)
    return first
