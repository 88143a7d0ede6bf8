"""ResNet-18 (He et al., 2016) for ImageNet: a 7×7 stem, and torchvision's parameter names."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fedala.lanes.layers import Layered


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet18(Layered):
    layers = (("fc",), ("layer4",), ("layer3",), ("layer2",), ("layer1",), ("conv1", "bn1"))

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return (
            lambda x: F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1),
            self.layer1,
            self.layer2,
            self.layer3,
            lambda x: self.layer4(x).mean((2, 3)),
            self.fc,
        )


def resnet18(shape: tuple[int, int, int] = (3, 64, 64), classes: int = 200) -> ResNet18:
    """Build an untrained ResNet-18 for images of `shape` (channels, height, width)."""
    return ResNet18(shape[0], classes)
