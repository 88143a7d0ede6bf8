"""The CNN of McMahan et al. (2017): two 5×5 convolutions without padding, two linear layers."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedala.errors import UserError
from fedala.lanes.blocks import run_conv_pool_relu, run_linear_relu
from fedala.lanes.layers import Layered


class CNN(Layered):
    layers = (("fc2",), ("fc1",), ("conv2",), ("conv1",))

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, *sides = shape
        # Each 5×5 convolution takes 4 from a side, each pooling halves it.
        height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
        if height < 1 or width < 1:
            raise UserError(
                f"The CNN needs images of at least 16×16 pixels, not {sides[0]}×{sides[1]}."
            )
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * height * width, 512)
        self.fc2 = nn.Linear(512, classes)

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (
            lambda x: run_conv_pool_relu(self.conv1, x),
            lambda x: run_conv_pool_relu(self.conv2, x).flatten(1),
            lambda x: run_linear_relu(self.fc1, x),
            self.fc2,
        )


def cnn(shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> CNN:
    """Build the paper's CNN for images of `shape` (channels, height, width)."""
    return CNN(shape, classes)
