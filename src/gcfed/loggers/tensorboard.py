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

from gcfed.utils.number import number

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FRAME = ".frame"


class RoundTensorBoardLogger(TensorBoardLogger):
    """Lightning's, in ``save_dir`` itself: a row of metrics at its round, pictures, and the hparams tab.

    What is true of the run as a whole (hyperparameters before its first round; how it ended, its last figures after
    the last) lies in event files of its own, ``.frame``, which the next start replaces: of two such entries TensorBoard
    keeps the first. It reads files in the order of their names and never returns to one, so names begin with the time.

    Args:
        save_dir: the run's folder.
        resume_round: last finished round of the checkpoint that the run continues; 0 starts anew.
    """

    def __init__(self, save_dir: str, resume_round: int = 0) -> None:
        number("logger.tensorboard.resume_round", resume_round, 0, whole=True)
        # A purge from the first round on, too: TensorBoard heeds only the second of a run.
        super().__init__(save_dir, name="", version="", default_hp_metric=False, purge_step=resume_round + 1)
        self._old = f"events.out.tfevents.*{FRAME if resume_round else ''}"
        self._table: dict[str, Any] = {}
        self._finished = False

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """Lightning asks for it when the run has begun, in the process that writes."""
        if self._experiment is None:
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb

            for old in Path(self.log_dir).glob(self._old):
                old.unlink()
            self._write_frame(hparams_pb(self._table, trial_id="").value, 0)  # the same settings are still two runs
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Keeps the table, one value a column, until events are written."""
        self._table = dict(vars(params) if isinstance(params, Namespace) else params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """One event a round, on disk at once: a run that is killed has all its rounds."""
        self._write([{"tag": tag, "simple_value": float(value)} for tag, value in metrics.items()], step)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[str | Path], step: int | None = None) -> None:
        """PNG files, as Lightning's W&B logger takes them."""
        for content in (Path(image).read_bytes() for image in images):
            width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))  # PNG's first chunk
            picture = {"width": width, "height": height, "colorspace": 4, "encoded_image_string": content}
            self._write([{"tag": key, "image": picture}], step)

    @rank_zero_only
    def log_summary(self, metrics: Mapping[str, float], step: int, *, success: bool) -> None:
        """The last figures of a run that has come to its end; ``success`` is false for one that diverged."""
        self.log_metrics(metrics, step)
        self._write([_session_end(success=success)], step)

    @rank_zero_only
    def save(self) -> None:
        """No ``hparams.yaml``: the resolved config lies in the run's folder."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is None or self._finished:
            return
        super().finalize(status)
        self._finished = True
        if status == "failed":
            self._write([_session_end(success=False)], None)

    def _write(self, values: Sequence[Any], step: int | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._finished:
            self._write_frame(values, step)
        else:
            self.experiment._get_file_writer().add_summary(Summary(value=values), step)
            self.experiment.flush()

    def _write_frame(self, values: Sequence[Any], step: int | None) -> None:
        """An event file of its own; the end's come behind those of the same second."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        now, folder = time.time(), Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(now) + self._finished:010d}.{time.time_ns()}{FRAME}"
        with (folder / name).open("wb") as file:
            for event in ({"file_version": "brain.Event:2"}, {"step": step, "summary": {"value": values}}):
                RecordWriter(file).write(Event(wall_time=now, **event).SerializeToString())


def _session_end(*, success: bool) -> dict[str, Any]:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
    content = plugin_data_pb2.HParamsPluginData(session_end_info=plugin_data_pb2.SessionEndInfo(status=status))
    about = metadata.create_summary_metadata(content)
    return {"tag": metadata.SESSION_END_INFO_TAG, "metadata": about, "tensor": metadata.NULL_TENSOR}
