"""Augmentation of training images: keyed draws on the host, applied to whole batches.

A transform is one number: (down · n + right) · 2 + flip, with n = 2·padding + 1 offsets each way.
A training order packs it with the sample, as sample · transforms + transform. So whatever carries
an order (early draws, the fixed buffers of captured steps) carries the augmentation with it.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes.normalization import check_images


@dataclass(frozen=True)
class Augmentation:
    """Which random changes a training image gets: first a crop, then a horizontal flip."""

    flip: bool = False
    #: Black pixels around the image, of which a crop takes the original size; 0: no crop.
    padding: int = 0

    @property
    def offsets(self) -> int:
        """Return the number of offsets of a crop in one direction."""
        return 2 * self.padding + 1

    @property
    def transforms(self) -> int:
        """Return the number of transforms; without flips, the odd ones are never drawn."""
        return 2 * self.offsets**2

    def check(self, x: Tensor, name: str) -> None:
        """Refuse samples that are not images, or that a crop could leave without a pixel."""
        check_images("augment", x, name)
        side = min(x.shape[-2:])
        if self.padding >= side:
            raise UserError(
                f"augment has crop:{self.padding}, and the images of {name} have "
                f"{x.shape[-1]}×{x.shape[-2]} pixels: a crop must be less than {side}."
            )

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw so many transforms: every offset and both directions are equally likely."""
        step = 1 if self.flip else 2
        return generator.integers(self.transforms // step, size=count) * step

    def pack(self, samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Draw a transform for each sample, and return both as one number each."""
        packed: np.ndarray = samples * self.transforms + self.draw(generator, len(samples))
        return packed

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples and their transforms."""
        return packed // self.transforms, packed % self.transforms

    def apply(self, x: Tensor, transforms: Tensor, black: Tensor) -> Tensor:
        """Return the images x, […, C, H, W], each after its transform, […].

        `black`, [C, 1, 1], is what fills the padding.
        """
        height, width = x.shape[-2:]
        down = transforms // (2 * self.offsets) - self.padding
        right = transforms // 2 % self.offsets - self.padding
        column = torch.arange(width, device=x.device)
        is_flipped = (transforms % 2 == 1).unsqueeze(-1)
        columns = torch.where(is_flipped, width - 1 - column, column) + right.unsqueeze(-1)
        rows = torch.arange(height, device=x.device) + down.unsqueeze(-1)
        nearest_row, nearest_column = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        source = nearest_row.unsqueeze(-1) * width + nearest_column.unsqueeze(-2)
        pixels = x.flatten(-2)
        taken = pixels.gather(-1, source.flatten(-2).unsqueeze(-2).expand_as(pixels)).view_as(x)
        if not self.padding:
            return taken
        is_inside = (rows == nearest_row).unsqueeze(-1) & (columns == nearest_column).unsqueeze(-2)
        return torch.where(is_inside.unsqueeze(-3), taken, black)


def parse_augmentation(text: str) -> Augmentation | None:
    """Read `none`, or a comma list of `flip` and `crop:4`."""
    words = [word.strip().lower() for word in text.split(",")]
    if words == ["none"]:
        return None
    kinds = [word.partition(":")[0] for word in words]
    is_known = all(re.fullmatch("flip|crop:[1-9][0-9]{0,3}", word) for word in words)
    if not is_known or len(set(kinds)) < len(kinds):
        raise UserError(
            f"augment must be none, flip, crop:4 (with any number of pixels) or flip,crop:4, "
            f"not {text!r}."
        )
    paddings = [int(word.removeprefix("crop:")) for word in words if word != "flip"]
    return Augmentation("flip" in words, sum(paddings))
