"""A CNN for windows of sensor data: two convolutions over time, two linear layers."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fedala.errors import UserError
from fedala.lanes.layers import Layered


class CNN1d(Layered):
    layers = (("fc2",), ("fc1",), ("conv2",), ("conv1",))

    def __init__(self, shape: tuple[int, int], classes: int) -> None:
        super().__init__()
        channels, length = shape
        if length < 4:
            raise UserError(
                f"cnn1d needs windows of at least 4 steps, and these samples are {channels} "
                f"channels of {length}: use mlp, or lstm if time comes first."
            )
        self.conv1 = nn.Conv1d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv1d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (length // 4), 128)  # each pooling halves the length
        self.fc2 = nn.Linear(128, classes)

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (
            lambda x: F.max_pool1d(self.conv1(x), 2).relu(),
            lambda x: F.max_pool1d(self.conv2(x), 2).relu().flatten(1),
            lambda x: self.fc1(x).relu(),
            self.fc2,
        )


def cnn1d(shape: tuple[int, int] = (9, 128), classes: int = 6) -> CNN1d:
    """Build a CNN for windows of `shape` (channels, steps)."""
    return CNN1d(shape, classes)
