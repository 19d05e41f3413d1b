"""LEAF's character model for Shakespeare (Caldas et al. 2019, after McMahan et al., AISTATS 2017).

Clients train one at a time, because ``torch.func.vmap`` does not support LSTMs.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from gcfed.models.stages import StageNetwork
from gcfed.utils.checked import Count, SettingError, checked


class CharLSTM(StageNetwork, nn.Module):
    """An embedding, two LSTM layers and a linear layer predict the next character at each position,
    or at the last one.

    Tokens 0 … C − 1 are characters. Token C is padding, which is never predicted. A negative token,
    such as a tokenizer's −1, is padding, too, and has the last embedding.

    Args:
        input_shape: (T,); the network takes any length.
        num_classes: C, number of characters and of logits.
        last_only: return logits for the last position only (LEAF), ``[B, C]`` instead of ``[B, T,
            C]``.
        vocabulary: number of tokens; None: C + 1.
    """

    names = ("embedding", "lstm1", "lstm2", "fc")

    @checked
    def __init__(
        self,
        *,
        input_shape: Sequence[Count],
        num_classes: Count,
        embedding: Count = 8,
        hidden: Count = 256,
        last_only: bool = False,
        vocabulary: Count | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise SettingError(
                "input_shape", f"={[*input_shape]}: model=lstm is for texts; images need model=cnn."
            )
        self.last_only = last_only
        self.num_tokens = vocabulary or num_classes + 1
        self.embedding = nn.Embedding(self.num_tokens, embedding)
        self.lstm1 = nn.LSTM(embedding, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, num_classes)

    def stage(self, name: str, hidden: Tensor) -> Tensor:
        if name == "embedding":
            hidden = hidden.masked_fill(hidden < 0, self.num_tokens - 1)
        hidden = self.get_submodule(name)(hidden)
        if not name.startswith("lstm"):
            return hidden
        h_BTH, _ = hidden
        if name == "lstm2" and self.last_only:
            return h_BTH[:, -1]
        return h_BTH
