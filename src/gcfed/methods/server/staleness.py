"""Weights of late uploads.

    FedBuff    w ← w + mean_k s(τ_k) Δ_k           Nguyen et al., AISTATS 2022, Algorithm 1
    FedAsync   w ← w + mean_k α s(τ_k) (w_k − w)   Xie et al., OPT 2020, Algorithm 1

    constant   s(τ) = 1
    polynomial s(τ) = (1 + τ)^−a
    hinge      s(τ) = 1 up to τ = b, then 1 / (a (τ − b) + 1)

τ is the number of the server's steps since the client's download. FedBuff's paper takes the
polynomial weight with a = ½. FedAsync mixes one model per step (``participation.per_round=1``).

Other public code differs from the printed rules: NVFlare halves fresh updates, APPFL takes Δ
against the present model, Plato and FLGo have no such weight in FedBuff.
"""

import logging
from typing import Literal

from gcfed.federated.parts import Fact, Order, Params, Round, ServerPart, Setup, Upload
from gcfed.methods.requirements import mean_aggregator, plain_server
from gcfed.participation.buffered import Buffered
from gcfed.utils.checked import PositiveShare, Weight, Whole, checked
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)

Rule = Literal["constant", "polynomial", "hinge"]


@checked
class FedBuff(ServerPart):
    """Scales updates by s(τ).

    Args:
        weight: s, one of the rules above.
        a: how fast it falls.
        b: the largest τ with the weight 1, for ``hinge``.
    """

    order = Order.SHORTENS
    needs = [mean_aggregator("other rules weight updates themselves")]

    def __init__(self, weight: Rule = "polynomial", a: Weight = 0.5, b: Whole = 4) -> None:
        self.weight = weight
        self.a = a
        self.b = b

    def validate(self, setup: Setup) -> None:
        if not isinstance(setup.sampler, Buffered):
            raise Refusal(
                f"{self.title} needs participation=buffered: in synchronous rounds no client is"
                " late."
            )

    def scale(self, staleness: int) -> float:
        """s(τ)."""
        if self.weight == "constant":
            return 1.0
        if self.weight == "polynomial":
            return float((1 + staleness) ** -self.a)
        return 1.0 / (self.a * max(0, staleness - self.b) + 1.0)

    def on_receive(self, upload: Upload, round: Round) -> Params | None:
        scale = self.scale(round.index - upload.round_index)
        if scale != 1:
            upload.delta = {name: t * scale for name, t in upload.delta.items()}
        return None


@checked
class FedAsync(FedBuff):
    """Mixes the clients' models into the global one.

    Args:
        mixing: α, the weight of a client's model that is not late.
        weight, a, b: as for :class:`FedBuff`.
    """

    facts = {Fact.EDITS_MEAN}
    needs = [*FedBuff.needs, plain_server("it mixes models")]

    def __init__(
        self,
        mixing: PositiveShare = 0.6,
        weight: Rule = "polynomial",
        a: Weight = 0.5,
        b: Whole = 4,
    ) -> None:
        super().__init__(weight, a, b)
        self.mixing = mixing

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        num_uploads = setup.sampler.most
        if num_uploads > 1:
            log.warning(
                "participation.per_round=%d: FedAsync's paper mixes one model per step, and here"
                " their mean is mixed. Set participation.per_round=1 for the paper's rule.",
                num_uploads,
            )

    def on_receive(self, upload: Upload, round: Round) -> Params | None:
        assert round.download is not None
        mixing = self.mixing * self.scale(round.index - upload.round_index)
        # w_k − w = Δ_k + (w_v − w), with w_v the model that the client was sent.
        moved = {
            name: round.download.broadcast_model[name] - t for name, t in round.server_model.items()
        }
        mixed = {}
        for name, delta in upload.delta.items():
            stays_on_client = not delta.numel()
            mixed[name] = delta if stays_on_client else (delta + moved[name]) * mixing
        upload.delta = mixed
        return None
