"""An LSTM (Hochreiter and Schmidhuber, 1997) for sequences of numbers or of tokens.

`nn.LSTM` does not run under vmap, so the recurrence is written out here. Its parameters have the
names, shapes and order of gates of `nn.LSTM`, which can load them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedala.lanes.layers import Layered


class Recurrence(nn.Module):
    """One layer of `nn.LSTM(inputs, width, batch_first=True)`, without its final state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight_ih_l0 = nn.Parameter(torch.empty(4 * width, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(4 * width, width))
        self.bias_ih_l0 = nn.Parameter(torch.empty(4 * width))
        self.bias_hh_l0 = nn.Parameter(torch.empty(4 * width))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state after each step: N×L×C becomes N×L×width."""
        # The inputs of all steps go through one product, and only the states wait for each other.
        bias = self.bias_ih_l0 + self.bias_hh_l0
        parts = F.linear(x, self.weight_ih_l0, bias)
        recurrent = self.weight_hh_l0.t()
        hidden = cell = parts.new_zeros(parts.shape[0], self.width)
        states = []
        for part in parts.unbind(1):
            gates = torch.addmm(part, hidden, recurrent)
            i, f, _, o = gates.sigmoid().chunk(4, dim=1)  # one call for three gates, and one unused
            cell = f * cell + i * gates[:, 2 * self.width : 3 * self.width].tanh()
            hidden = o * cell.tanh()
            states.append(hidden)
        return torch.stack(states, dim=1)


class LSTM(Layered):
    """The largest value of each hidden unit over time, then a linear layer.

    With plain SGD, this learns in far fewer steps than the last state or the mean does.
    """

    layers = (("fc",), ("lstm",))

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.lstm = Recurrence(channels, width)
        self.fc = nn.Linear(width, classes)

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (lambda x: self.lstm(x).amax(1), self.fc)


class TokenLSTM(Layered):
    """An embedding of tokens, then the same. States at padding and unknown words do not count."""

    layers = (("fc",), ("lstm",), ("embedding",))

    def __init__(self, vocabulary: int, classes: int, width: int, embedding_width: int) -> None:
        super().__init__()
        # Row 0 is for unknown words and padding: it is zero, and `padding_idx` keeps it so.
        self.embedding = nn.Embedding(vocabulary, embedding_width, padding_idx=0)
        self.lstm = Recurrence(embedding_width, width)
        self.fc = nn.Linear(width, classes)

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (self.embedding, self._pool_states, self.fc)

    def _pool_states(self, embedded: Tensor) -> Tensor:
        is_known = (embedded != 0).any(2, keepdim=True)
        return torch.where(is_known, self.lstm(embedded), -1).amax(1)  # states are above -1


def lstm(channels: int = 9, classes: int = 6, width: int = 64) -> LSTM:
    """Build an LSTM for sequences N×L×C of numbers, with `channels` of them at each step."""
    return LSTM(channels, classes, width)


def token_lstm(
    vocabulary: int = 98635, classes: int = 4, width: int = 64, embedding_width: int = 32
) -> TokenLSTM:
    """Build an LSTM for rows of token ids, with `vocabulary` words, including index 0."""
    return TokenLSTM(vocabulary, classes, width, embedding_width)
