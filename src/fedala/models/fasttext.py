"""fastText (Joulin et al., 2017): the mean of word embeddings, a hidden linear layer, a linear output layer."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedala.lanes.layers import Layered


class FastText(Layered):
    layers = (("fc",), ("hidden",), ("embedding",))

    def __init__(self, vocabulary: int, classes: int, width: int) -> None:
        super().__init__()
        # Row 0 stands for unknown words and padding: zero, and `padding_idx` keeps it from learning.
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.hidden = nn.Linear(width, width)
        self.fc = nn.Linear(width, classes)

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (lambda x: self.embedding(x).mean(1), self.hidden, self.fc)


def fasttext(vocabulary: int = 98635, classes: int = 4, width: int = 32) -> FastText:
    """fastText over `vocabulary` words, index 0 among them."""
    return FastText(vocabulary, classes, width)
