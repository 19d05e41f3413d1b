"""LEAF's character model for Shakespeare: an embedding, two LSTM layers, one linear layer.

"Communication-Efficient Learning of Deep Networks from Decentralized Data" (McMahan et al., AISTATS 2017) and LEAF
(Caldas et al. 2019). A stack trains one client at a time: ``torch.func.vmap`` knows no LSTM.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from gcfed.models.stages import Stage, Staged
from gcfed.utils.number import number


class CharLSTM(Staged, nn.Module):
    """``embedding``, ``lstm1``, ``lstm2`` and ``fc``; predicts the next character after each, or after the last.

    Tokens 0 … C − 1 are the characters, C is padding: it has an embedding of its own and is never predicted.

    Args:
        input_shape: (T,) of one sequence; the network takes any length.
        num_classes: C, number of characters and of logits.
        embedding: width of the embedding.
        hidden: width of both LSTM layers.
        last_only: return logits for the last position alone (LEAF), ``[B, C]`` instead of ``[B, T, C]``.
        vocabulary: number of tokens that it can read; None: C + 1.

    Raises:
        ValueError: ``input_shape`` is that of an image, or a width is no number.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        embedding: int = 8,
        hidden: int = 256,
        last_only: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(
                f"model=lstm reads texts (data=tiny_shakespeare, data=shakespeare), not data.input_shape="
                f"{list(input_shape)}: take model=mlp or model=cnn for images."
            )
        self.last_only = last_only
        for key, value in (("embedding", embedding), ("hidden", hidden)):
            number(f"model.{key}", value, 1, whole=True)
        number("model.vocabulary", vocabulary, 1, whole=True, none=True)
        self.embedding = nn.Embedding(vocabulary or num_classes + 1, embedding)
        self.lstm1 = nn.LSTM(embedding, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, num_classes)

    def _layer1(self, h_BTE: Tensor) -> Tensor:
        return self.lstm1(h_BTE)[0]

    def _layer2(self, h_BTH: Tensor) -> Tensor:
        h_BTH = self.lstm2(h_BTH)[0]
        return h_BTH[:, -1] if self.last_only else h_BTH

    def stages(self) -> dict[str, Stage]:
        """One stage a layer."""
        return {"embedding": self.embedding, "lstm1": self._layer1, "lstm2": self._layer2, "fc": self.fc}
