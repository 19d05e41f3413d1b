"""The accuracies that tables report: smoothed over rounds."""

from collections import deque
from typing import Any

from gcfed.federated.method import ServerPart
from gcfed.federated.round import Round
from gcfed.runs.measures import DECAY, WINDOW


class SmoothedAccuracy(ServerPart):
    """Adds ``test/acc_smooth10`` and ``test/acc_ema`` (FedACG's) to the rounds that are tested.

    The former is the mean of the last ten tests: at ``eval_every=1`` of the last ten rounds, as in GC-Fed's tables.

    They cost nothing and are on by default, beside the progress bar and the checkpoints; ``~callbacks.smoothing`` turns
    them off. The summary of a run reads the accuracies themselves and does not need them.
    """

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.ema: float | None = None  # the first test starts it

    def on_round_end(self, row: dict[str, Any], round: Round) -> None:
        if "test/acc" not in row:
            return
        acc = row["test/acc"]
        self.last.append(acc)
        self.ema = acc if self.ema is None else DECAY * self.ema + (1 - DECAY) * acc
        row[f"test/acc_smooth{WINDOW}"] = sum(self.last) / len(self.last)
        row["test/acc_ema"] = self.ema

    def state_dict(self) -> dict[str, Any]:
        return {"last": list(self.last), "ema": self.ema}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last.extend(state_dict["last"])
        self.ema = state_dict["ema"]
