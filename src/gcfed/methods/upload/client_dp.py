"""Differential privacy for clients: DP-FedAvg (McMahan et al., ICLR 2018, Algorithm 1, with equal
weights).

Each client takes part with probability q, independently of the others. It sends its update Δ_k,
clipped to the norm C. The server adds noise to the sum, and divides by the expected size of the
cohort (their estimator f̃_f):

    Δ = (Σ_k Δ_k + N(0, σ²C²)) / (qN)

The noise is a function of (seed, round). The models of all rounds together are (ε,
δ)-differentially private for the addition or removal of one client with all its samples.
docs/privacy.md lists what ε does not cover. opacus computes ε from Rényi divergences (RDP, Mironov
et al. 2019), which is fast, and from the distribution of the privacy loss (PRV, Gopi et al.,
NeurIPS 2021), which is tighter and takes about a second.
"""

import logging
import math
from typing import Annotated, Any

import torch
from pydantic import Field

from gcfed.federated.parts import (
    ClientPart,
    ClientStates,
    Download,
    Fact,
    Method,
    Order,
    Params,
    Part,
    Received,
    ServerPart,
    Setup,
    Upload,
)
from gcfed.methods.requirements import mean_aggregator
from gcfed.methods.upload.clip_update import clip_
from gcfed.participation.sampling import PoissonSampler
from gcfed.utils.checked import Inside, Positive, SettingError, Weight, checked
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import torch_seed

log = logging.getLogger(__name__)
LARGE = 100.0  # PRV would take minutes for a larger ε
# hooks that see what clients send
READS = ("uploads", "notes", "on_receive", "on_aggregate_end", "decode")


@checked
class ClientDP(Method):
    """Clips updates and adds noise to their sum. Each row has ``privacy/epsilon_rdp``, the ε so
    far; the last row also has ``privacy/epsilon_prv`` if ε is below 100.

    Args:
        max_norm: C.
        noise_multiplier: σ. 0: no noise, and ε is infinite.
        epsilon: the ε of all rounds together, by PRV; finds σ before the first round.
        delta: δ; choose it far below 1/N.
    """

    def __init__(
        self,
        max_norm: Positive = 1.0,
        *,
        noise_multiplier: Weight | None = None,
        epsilon: Annotated[float, Field(ge=0.1, le=LARGE)] | None = None,
        delta: Inside = 1e-5,
    ) -> None:
        if (noise_multiplier is None) == (epsilon is None):
            raise SettingError(
                "epsilon",
                f"={epsilon} and noise_multiplier={noise_multiplier}: set one of them, and leave"
                " the other null.",
            )
        super().__init__(ClipAll(max_norm), Noise(max_norm, noise_multiplier, epsilon, delta))


class ClipAll(ClientPart):
    """Unlike ``ClipUpdate``, it sends no second message: even one bit would need noise."""

    order = Order.SHORTENS

    def __init__(self, max_norm: float) -> None:
        self.max_norm = torch.tensor(max_norm, dtype=torch.float64)

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        clip_(list(upload.delta.values()), self.max_norm)


class Noise(ServerPart):
    writes = ("privacy/epsilon_rdp", "privacy/epsilon_prv")
    facts = {Fact.STEPS_WITHOUT_CLIENTS}
    needs = [
        mean_aggregator(
            "with another rule, a client can change the sum by more than C", uniform=True
        )
    ]

    def __init__(
        self, max_norm: float, sigma: float | None, epsilon: float | None, delta: float
    ) -> None:
        self.max_norm = max_norm
        self.epsilon = epsilon
        self.delta = delta
        self.sigma: float = sigma  # type: ignore[assignment]  # None until ``bind``

    def validate(self, setup: Setup) -> None:
        check_assumptions(setup, self.title)

    def bind(self, setup: Setup) -> None:
        self.expected = setup.sampler.per_round
        self.rounds = setup.rounds
        try:
            self._account(self.expected / setup.data.num_clients)
        except ImportError as error:
            raise Refusal(
                "privacy=client_dp needs a package: uv pip install -e '.[privacy]'"
            ) from error
        except (ValueError, RuntimeError) as error:  # of opacus
            raise Refusal(
                f"privacy.epsilon={self.epsilon} and delta={self.delta}: {error}"
            ) from error

    def _account(self, rate: float) -> None:
        """Finds σ, if it is not given, and the ε of all rounds; ``rate``: q."""
        from opacus.accountants import PRVAccountant, RDPAccountant
        from opacus.accountants.analysis.rdp import compute_rdp
        from opacus.accountants.utils import get_noise_multiplier

        if self.epsilon is not None:
            tolerance = min(0.01, self.epsilon / 100)
            self.sigma = get_noise_multiplier(
                target_epsilon=self.epsilon,
                target_delta=self.delta,
                sample_rate=rate,
                steps=self.rounds,
                accountant="prv",
                epsilon_tolerance=tolerance,
                eps_error=tolerance,
            )
        self.orders = RDPAccountant.DEFAULT_ALPHAS
        self.divergences = compute_rdp(
            q=rate, noise_multiplier=self.sigma, steps=1, orders=self.orders
        )
        rdp = self.spent(self.rounds)
        self.total = {"privacy/epsilon_rdp": rdp}
        if self.epsilon or rdp < LARGE:
            prv = PRVAccountant()
            error = min(0.01, (self.epsilon or rdp) / 100)
            prv.history = [(self.sigma, rate, self.rounds)]
            self.total["privacy/epsilon_prv"] = float(prv.get_epsilon(self.delta, eps_error=error))
        log.info("privacy: σ=%.5g, δ=%g; after all rounds: %s", self.sigma, self.delta, self.total)

    def spent(self, rounds: int) -> float:
        """ε of the first rounds together, by RDP."""
        from opacus.accountants.analysis.rdp import get_privacy_spent

        if not self.sigma:
            return math.inf
        divergences = rounds * self.divergences
        epsilon, _ = get_privacy_spent(orders=self.orders, rdp=divergences, delta=self.delta)
        return float(epsilon)

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        random = torch.Generator(update[self.trained_names[0]].device)
        random.manual_seed(torch_seed(round.seed, "privacy", round.index))
        for name in self.trained_names:
            # the mean becomes the sum divided by qN
            t = update[name].mul_(round.num_finite / self.expected)
            noise = torch.randn(t.shape, generator=random, device=t.device, dtype=torch.float64)
            t.add_(noise, alpha=self.sigma * self.max_norm / self.expected)

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        done = round.index + 1
        row |= self.total if done == self.rounds else {"privacy/epsilon_rdp": self.spent(done)}

    def state_dict(self) -> dict[str, Any]:
        return {"sigma": self.sigma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = state_dict["sigma"]
        if known != self.sigma:
            needs = (
                f"privacy.epsilon={self.epsilon} needs σ={self.sigma:.5g}, and finished rounds had"
                f" σ={known:.5g}"
            )
            raise Refusal(f"rounds={self.rounds}: {needs}. Keep the number of rounds.")


def check_assumptions(setup: Setup, title: str) -> None:
    """Raises Refusal for a run whose models ε would not cover."""
    if setup.transport.remote:
        raise Refusal(f"{title} needs federation=none: no site can be forced to clip.")
    if not isinstance(setup.sampler, PoissonSampler):
        raise Refusal(
            f"{title} needs participation=poisson: ε assumes that clients are drawn independently."
        )
    if setup.faults.extra:
        raise Refusal(
            f"{title} needs participation.faults.extra=null: ε assumes that no client replaces"
            " another one."
        )
    for part in setup.parts:
        does = _does_wrong(part)
        if does:
            raise Refusal(
                f"{title} does not combine with {part.title}, which {does}: set privacy=none."
            )
    averaged = sorted(setup.no_steps)
    if averaged:
        raise Refusal(
            f"{title} does not combine with model={type(setup.module.net).__name__}, which sends"
            f" {averaged[0]}, and noise may make it negative: use another normalisation"
            " (model.norm_policy=group)."
        )


def _does_wrong(part: Part) -> str:
    """What a part does with uploads that ε does not cover; empty if nothing."""
    if isinstance(part, ClipAll | Noise) or part.order is Order.MEASURES:
        return ""
    if isinstance(part, ServerPart):
        for hook in READS:
            if getattr(type(part), hook) is not getattr(ServerPart, hook):
                return "reads more than the noisy sum of updates"
    if isinstance(part, ClientPart) and part.order >= Order.SHORTENS and part.overrides("send"):
        return "changes updates that are already clipped"
    return ""
