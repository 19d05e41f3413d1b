"""The order in which a forward pass uses a network's parameters, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ForwardOrder:
    """The order in which one forward pass uses a network's parameters.

    The place of a parameter is the last call of its module. If a module multiplies the data by
    several weights, or other modules use its weight, the place is where the weight meets the data.
    Parameters with the same place, such as all weights of an LSTM, keep the order of declaration.

    Attributes:
        params: all parameters, by name, in the order of declaration.
        place: name → when it is used.
        unused: parameters that the pass does not use. Their place is that of the parameter declared
            before.
        used_as_weights: the parameters of two or more axes that are weights of a layer.
        matrices: parameters that are matrices of a layer's outputs and inputs: of convolutions,
            ``[out, in]`` in products, and tables of tokens. Stacked experts ``[E, in, out]``, rates
            of a state-space layer and pairs of real and imaginary parts are not.
        groups: of each weight with outputs on axis 1, ``[in, out / groups, …]``: transposed
            convolutions, ``x @ w``.
    """

    params: Mapping[str, Tensor]
    place: Mapping[str, int]
    unused: Sequence[str]
    used_as_weights: Set[str]
    matrices: Set[str]
    groups: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        """All parameters in order."""
        return sorted(self.params, key=lambda name: self.place[name])

    def before(self, place: int) -> list[str]:
        """The parameters that are used before this place."""
        return [name for name in self.names if self.place[name] < place]

    @property
    def weights(self) -> list[str]:
        """Parameters of two or more axes that are used as weights of a layer, in order."""
        return [name for name in self.names if name in self.used_as_weights]

    @property
    def last(self) -> str:
        """The weight that is used last; the last parameter if there is no weight."""
        return (self.weights or self.names)[-1]

    @property
    def last_module(self) -> str:
        """The module of :attr:`last`; the parameter itself if it belongs to the network."""
        module, is_parametrized, _ = self.last.partition(".parametrizations.")
        if is_parametrized:
            return module
        return self.last.rpartition(".")[0] or self.last

    @property
    def added(self) -> set[str]:
        """Parameters of two or more axes that are no weights of a layer.

        Most are added or looked up, such as class tokens and positions. They may be scaled before.
        Learned queries are the input of a layer. A weight may be a function that mixes the rows of
        its parameter, as ``orthogonal`` does. Others are ``[1, …]``: they scale activations entry
        by entry, or all outputs of a weight alike, as those of ``weight_norm(dim=1)`` do.
        """
        return _with_axes(self.params) - self.used_as_weights

    @property
    def odd(self) -> list[str]:
        """Weights of two or more axes that no operation uses as a matrix of outputs and inputs."""
        odd = [name for name in self.weights if name not in self.matrices]
        # a mean over a single number is not subtracted
        return [name for name in odd if self.params[name].numel() > len(self.params[name])]

    def facts(self) -> list[str]:
        """Facts about the order that may surprise the user."""
        facts = []
        used = [name for name in self.names if name not in self.unused]
        declared = [name for name in self.params if name not in self.unused]
        for name, other in zip(used, declared, strict=True):
            if name != other:
                facts.append(
                    f"the forward pass uses {name} before {other}, which is declared first"
                )
                break
        if self.added:
            facts.append(
                "no weights of a layer, and so not centralized (unless gc.tensors=all):"
                f" {', '.join(sorted(self.added))}"
            )
        if self.unused:
            facts.append(
                "not used by a forward pass, and counted where they are declared:"
                f" {', '.join(self.unused)}"
            )
        if self.odd:
            odd = [f"{name} {[*self.params[name].shape]}" for name in self.odd]
            facts.append(
                "no matrices [out, in] of a layer, but centralized over all axes except the first"
                f" (unless you keep it as a vector): {', '.join(odd)}"
            )
        return facts


def declared_order(net: nn.Module) -> ForwardOrder:
    """The order of declaration, in which all tensors of two or more axes are weights."""
    params = dict(net.named_parameters())
    weights = _with_axes(params)
    return ForwardOrder(
        params=params,
        place={name: place for place, name in enumerate(params)},
        unused=[],
        used_as_weights=weights,
        matrices=weights,
        groups={},
    )


def _with_axes(params: Mapping[str, Tensor]) -> set[str]:
    """The names of the parameters with two or more axes."""
    return {name for name, parameter in params.items() if parameter.dim() > 1}
