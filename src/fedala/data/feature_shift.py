"""Feature shift: clients whose samples look different, such as photos from another camera.

A shift changes the samples of each client once, after they are divided. So training, testing and
everything else see the changed samples.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedala.data.federation import Federation
from fedala.errors import UserError
from fedala.io.untrusted import check_memory
from fedala.lanes.normalization import check_images
from fedala.lanes.randomness import draw
from fedala.options import name_option

_CHUNK = 256  # images that are turned at a time
_MOST_ANGLES, _MOST_NOISE = 10_000, 1e6


@dataclass(frozen=True)
class Rotation:
    """Images turned counter-clockwise: client i by the angle i, cyclically, or by i steps."""

    angles: tuple[float, ...] = ()
    step: float = 0.0

    def angle(self, client: int) -> float:
        """Return the degrees of a client, from 0 to 360."""
        angle = self.angles[client % len(self.angles)] if self.angles else client * self.step
        return angle % 360

    def check(self, x: Tensor, name: str, clients: int) -> None:
        check_images("feature_shift", x, name)
        height, width = x.shape[2:]
        angles = {self.angle(client) for client in range(clients)}
        if height != width and angles & {90, 270}:
            raise UserError(
                f"feature_shift turns images by 90 or 270 degrees, and those of {name} have "
                f"{width}×{height} pixels: only a square stays as it is, so use "
                f"{name_option('resize')} or other angles."
            )

    def change(self, x: Tensor, client: int, clients: int, seed: int) -> Tensor:
        return rotate_images(x, self.angle(client))


@dataclass(frozen=True)
class Noise:
    """Gaussian noise with the standard deviation σ·i/N for client i (from 0) of N clients.

    This is the feature skew of NIID-Bench (Li et al., 2022). Bytes count as numbers from 0 to 1;
    what would leave that range is clipped.
    """

    sigma: float

    def check(self, x: Tensor, name: str, clients: int) -> None:
        if x.dtype not in (torch.uint8, torch.float32):
            raise UserError(
                f"feature_shift adds noise to images and numbers, and {name} holds "
                f"{str(x.dtype).removeprefix('torch.')} samples, which are tokens."
            )

    def change(self, x: Tensor, client: int, clients: int, seed: int) -> Tensor:
        level = self.sigma * client / clients
        if level == 0:
            return x
        generator = draw(seed, "feature shift", client=client)
        noise = torch.from_numpy(generator.standard_normal(tuple(x.shape), dtype=np.float32))
        if x.dtype == torch.uint8:
            return (x + 255 * level * noise).round_().clamp_(0, 255).to(torch.uint8)
        return x + level * noise


FeatureShift = Rotation | Noise


def parse_feature_shift(text: str | None) -> FeatureShift | None:
    """Read `rotate:90` (steps), `rotate:0,90,180,270` (angles) or `noise:0.1`."""
    if text is None:
        return None
    kind, _, values = text.strip().lower().partition(":")
    readers: dict[str, Callable[[list[float]], FeatureShift | None]] = {
        "rotate": _make_rotation,
        "noise": _make_noise,
    }
    words = [word.strip() for word in values.split(",")]
    if kind in readers and all(re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", w) for w in words):
        try:
            shift = readers[kind]([float(word) for word in words])
        except (ValueError, OverflowError):
            shift = None
        if shift is not None:
            return shift
    raise UserError(
        "feature_shift must be rotate:30 (client i is turned by i·30 degrees), rotate:0,90,180 "
        "(clients take turns with these angles) or noise:0.1 (noise of up to this level), "
        f"not {text!r}."
    )


def _make_rotation(numbers: list[float]) -> Rotation | None:
    if not all(abs(number) <= 360 for number in numbers) or len(numbers) > _MOST_ANGLES:
        return None
    if len(numbers) == 1:
        return Rotation(step=numbers[0]) if numbers[0] % 360 else None
    return Rotation(tuple(numbers))


def _make_noise(numbers: list[float]) -> Noise | None:
    return Noise(numbers[0]) if len(numbers) == 1 and 0 < numbers[0] <= _MOST_NOISE else None


def shift_features(
    federation: Federation, shift: FeatureShift, seed: int, clients: int | None = None
) -> Federation:
    """Return the federation with the samples of each client changed.

    `clients` is the number of clients if the federation does not hold them all, as on a node of
    its own. A sample is changed in the same way whichever part it is in, and whatever the split.
    """
    data = federation.dataset
    count = clients or len(federation.train)
    shift.check(data.x, data.name, count)
    check_memory(data.x.numel() * data.x.element_size(), f"{data.name} after its feature shift")
    x = data.x.clone()
    parts = zip(federation.train, federation.validation, federation.test, strict=True)
    for client, own in enumerate(parts):
        rows = torch.from_numpy(np.sort(np.concatenate(own)))
        if len(rows):
            x[rows] = shift.change(data.x[rows], client, count, seed)
    return replace(federation, dataset=replace(data, x=x))


def rotate_images(x: Tensor, degrees: float) -> Tensor:
    """Turn images, N×C×H×W, counter-clockwise about their centre; corners without pixels are 0.

    Multiples of 90 degrees are exact. Others are interpolated (bilinear).
    """
    if degrees % 90 == 0:
        return torch.rot90(x, int(degrees // 90) % 4, (2, 3))
    height, width = x.shape[2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # The grid counts from -1 to 1 each way, whatever the number of pixels.
    theta = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])
    chunks = []
    for first in range(0, len(x), _CHUNK):
        chunk = x[first : first + _CHUNK]
        grid = affine_grid(theta.expand(len(chunk), 2, 3), list(chunk.shape), align_corners=False)
        chunks.append(grid_sample(chunk.float(), grid, align_corners=False))
    turned = torch.cat(chunks)
    return turned.round_().to(torch.uint8) if x.dtype == torch.uint8 else turned
