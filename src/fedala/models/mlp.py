"""A multilayer perceptron for features: two hidden layers of 64 with ReLU."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedala.lanes.layers import Layered


class MLP(Layered):
    layers = (("fc3",), ("fc2",), ("fc1",))

    def __init__(self, features: int, classes: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, classes)

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (
            lambda x: self.fc1(x.flatten(1)).relu(),
            lambda x: self.fc2(x).relu(),
            self.fc3,
        )


def mlp(features: int = 64, classes: int = 10, width: int = 64) -> MLP:
    """Build a perceptron for samples of so many numbers, of whatever shape."""
    return MLP(features, classes, width)
