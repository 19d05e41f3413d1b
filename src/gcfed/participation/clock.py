"""How long clients take, and when they can be asked, on a simulated clock.

Each draw depends only on (seed, round, client). Each device's factor and phase depend only on
(seed, client).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from gcfed.utils.checked import Positive, PositiveShare, SettingError, Weight, checked
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator

ROUNDING = 1e-9  # a client is asked this share of a day after it becomes available


@checked
@dataclass(frozen=True)
class Clock:
    """A client's time is (fixed + step · its local steps + byte · its messages) times its device's
    factor, times a factor that is drawn anew.

    Args:
        step: seconds of a local step. None: rounds have no time; where an order of answers is
            needed, a step takes one second.
        fixed: seconds of a client that do not depend on its steps.
        byte: seconds per byte of a client's download and upload. Their size is that of the last
            round's messages.
        spread: standard deviation of the logarithm of the devices' factors, which last for the
            whole run. 0: all devices are equal.
        jitter: the factor that is drawn anew: ``exponential`` with mean 1, or the standard
            deviation of its logarithm.
        trace: a .npy file with the factors of real devices, instead of ``spread``. Each client
            draws one of them.
        available: the share of a day in which a client can be asked; each client's window begins
            at a time of its own. None: always.
        day: seconds of a day.
    """

    step: Positive | None = None
    fixed: Weight = 0.0
    byte: Weight = 0.0
    spread: Weight = 0.0
    jitter: Literal["exponential"] | Weight = "exponential"
    trace: str | None = None
    available: PositiveShare | None = None
    day: Positive = 86400.0

    def __post_init__(self) -> None:
        if self.trace is not None:
            self._check_trace(Path(self.trace))
        if self.step is None and (self.byte or self.available is not None):
            name = "byte" if self.byte else "available"
            raise SettingError(name, ": rounds have no time. Set participation.clock.step, too.")

    def refuse_times(self) -> None:
        """Raises Refusal for a setting of clients' times. Called if nothing depends on them."""
        without = Clock()
        for name in ("fixed", "spread", "jitter", "trace"):
            if getattr(self, name) != getattr(without, name):
                raise Refusal(
                    f"participation.clock.{name}: rounds have no time. Set"
                    " participation.clock.step, too."
                )

    def _check_trace(self, path: Path) -> None:
        if not path.is_file():
            raise SettingError("trace", f"={path}: there is no such file")
        try:
            factors = self._factors
        except (ValueError, TypeError, OSError, EOFError):
            raise SettingError("trace", f"={path} is no .npy file of numbers") from None
        if len(factors) == 0 or not (factors > 0).all() or not np.isfinite(factors).all():
            raise SettingError("trace", f"={path}: its factors must be finite and above 0")

    @cached_property
    def _factors(self) -> np.ndarray:
        assert self.trace is not None
        # A stranger's file must not run code.
        return np.load(self.trace, allow_pickle=False).astype(np.float64).ravel()

    # -------------------------------------------------------------------------------------- times
    def seconds(
        self,
        clients: np.ndarray,
        steps: np.ndarray,
        draws: Sequence[np.random.Generator],
        seed: int,
        message_bytes: float = 0.0,
    ) -> np.ndarray:
        """The times of these clients, ``[K]``.

        Args:
            clients, steps: ids and numbers of local steps, ``[K]``.
            draws: a generator of this round for each client.
            message_bytes: size of a client's download and upload together.
        """
        one_step = 1.0 if self.step is None else self.step
        nominal = self.fixed + one_step * steps + self.byte * message_bytes
        return nominal * self._devices(clients, seed) * self._jitters(draws)

    def _jitters(self, draws: Sequence[np.random.Generator]) -> np.ndarray:
        if self.jitter == "exponential":
            return np.array([draw.exponential() for draw in draws])
        return np.exp([self.jitter * draw.normal() for draw in draws])

    def _devices(self, clients: np.ndarray, seed: int) -> np.ndarray:
        """The factors of these clients' devices, ``[K]``."""
        if self.trace is None and self.spread == 0:
            return np.ones(len(clients))
        draws = [generator(seed, "device", client) for client in clients.tolist()]
        if self.trace is None:
            return np.exp([self.spread * draw.normal() for draw in draws])
        return np.array([self._factors[draw.integers(len(self._factors))] for draw in draws])

    # ------------------------------------------------------------------------------- availability
    def is_available(self, seconds: float, num_clients: int, seed: int) -> np.ndarray:
        """Whether each client can be asked at this time, bool ``[N]``."""
        assert self.available is not None
        return self._time_of_day(seconds, num_clients, seed) < self.available

    def next_available(
        self, seconds: float, candidates: np.ndarray, enough: int, seed: int
    ) -> float:
        """The first time, not before ``seconds``, at which ``enough`` clients can be asked.

        Args:
            candidates: which clients count, bool ``[N]``.
        """
        num_clients = len(candidates)
        of_day = self._time_of_day(seconds, num_clients, seed)
        begins = (1.0 - of_day + ROUNDING) * self.day  # seconds until each client's window begins
        for wait in (0.0, *np.sort(begins[candidates]).tolist()):
            available = self.is_available(seconds + wait, num_clients, seed)
            if (available & candidates).sum() >= enough:
                return seconds + wait
        raise AssertionError("require_enough() has found a time")

    def require_enough(self, num_clients: int, enough: int, seed: int) -> None:
        """Raises Refusal if there is no time at which ``enough`` clients can be asked."""
        if self.available is None or self.available == 1:
            return
        begins = np.sort(1.0 - _phases(num_clients, seed))
        around_midnight = np.concatenate([begins, begins + 1.0])
        last = np.searchsorted(around_midnight, begins + self.available - ROUNDING)
        most = int((last - np.arange(num_clients)).max())
        if most < enough:
            raise Refusal(
                f"participation.clock.available={self.available:g}: at most {most} of {num_clients}"
                f" clients can be asked at one time, and {enough} are needed. Raise it."
            )

    def _time_of_day(self, seconds: float, num_clients: int, seed: int) -> np.ndarray:
        """The time since each client's window began, as a share of a day, ``[N]``."""
        return (seconds / self.day + _phases(num_clients, seed)) % 1.0


@lru_cache(maxsize=4)
def _phases(num_clients: int, seed: int) -> np.ndarray:
    """Each client's time of day at the start of a run, as a share of a day, ``[N]``, read-only."""
    phases = generator(seed, "phase").random(num_clients)
    phases.flags.writeable = False
    return phases
