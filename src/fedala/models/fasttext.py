"""fastText (Joulin et al., 2017): mean of word embeddings, hidden linear layer, output layer."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedala.lanes.layers import Layered
from fedala.lanes.words import MeanEmbedding


class FastText(Layered):
    layers = (("fc",), ("hidden",), ("embedding",))

    def __init__(self, vocabulary: int, classes: int, width: int) -> None:
        super().__init__()
        # Row 0 is for unknown words and padding: it is zero, and `padding_idx` keeps it so.
        self.embedding = MeanEmbedding(vocabulary, width, padding_idx=0)
        self.hidden = nn.Linear(width, width)
        self.fc = nn.Linear(width, classes)

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (self.embedding, self.hidden, self.fc)


def fasttext(vocabulary: int = 98635, classes: int = 4, width: int = 32) -> FastText:
    """Build fastText for `vocabulary` words, including index 0."""
    return FastText(vocabulary, classes, width)
