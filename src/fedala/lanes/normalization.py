"""Normalisation: (x − mean)/std of pixels from 0 to 1, or of the features of float samples."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from fedala.errors import UserError

#: The means and standard deviations of known datasets' training images.
KNOWN = {
    "mnist": "0.1307/0.3081",
    "fashion-mnist": "0.2860/0.3530",
    "cifar10": "0.4914,0.4822,0.4465/0.2470,0.2435,0.2616",
    "cifar100": "0.5071,0.4865,0.4409/0.2673,0.2564,0.2762",
    "imagenet": "0.485,0.456,0.406/0.229,0.224,0.225",
}
_LEAST, _MOST = 1e-12, 1e12  # of a standard deviation; the most also of a mean


@dataclass(frozen=True)
class Normalization:
    """A mean and a standard deviation: one number each, or one for every channel or feature.

    A sample's first dimension are its channels, or its last if `is_channels_last`.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    is_channels_last: bool = False

    def check(self, x: Tensor, name: str) -> None:
        """Refuse samples that are not numbers, or not of so many channels."""
        if not is_normalizable(x):
            raise UserError(
                f"normalize is for images and float samples, and the samples of {name} are "
                f"{_describe(x)}."
            )
        channels = x.shape[-1 if self.is_channels_last else 1]
        what = "feature" if x.ndim == 2 else "channel"
        samples = "images" if x.ndim == 4 else "samples"
        for figure, numbers in (("means", self.mean), ("standard deviations", self.std)):
            if len(numbers) not in (1, channels):
                raise UserError(
                    f"normalize has {len(numbers)} {figure}, and the {samples} of {name} have "
                    f"{_count(channels, what)}: give one number, or one for each {what}."
                )

    def figures(
        self, device: torch.device, dtype: torch.dtype, dimensions: int = 3
    ) -> list[float | Tensor]:
        """Return mean and standard deviation as they apply to samples of so many dimensions."""
        shape = [-1] if self.is_channels_last else [-1] + [1] * (dimensions - 1)
        return [
            numbers[0]
            if len(numbers) == 1
            else torch.tensor(numbers, dtype=dtype, device=device).view(shape)
            for numbers in (self.mean, self.std)
        ]


def is_normalizable(x: Tensor) -> bool:
    """Tell whether samples are images of bytes, or floats."""
    return (x.dtype == torch.uint8 and x.ndim == 4) or (x.is_floating_point() and x.ndim > 1)


def normalize_bytes(
    x: Tensor, dtype: torch.dtype, mean: float | Tensor, std: float | Tensor
) -> Tensor:
    """Return bytes as (x/255 − mean)/std."""
    return x.to(dtype).div_(255).sub_(mean).div_(std)


def normalize_floats(
    x: Tensor, dtype: torch.dtype, mean: float | Tensor, std: float | Tensor
) -> Tensor:
    """Return floats as (x − mean)/std."""
    return x.to(dtype).sub(mean).div_(std)


def parse_normalization(text: str | None) -> Normalization | None:
    """Read `mean/std`, with one number or one for each channel, or the name of known figures."""
    if text is None:
        return None
    mean, slash, std = KNOWN.get(text.strip().lower(), text).partition("/")
    try:
        if not slash:
            raise ValueError
        means, stds = _read_numbers(mean), _read_numbers(std)
    except ValueError:
        raise UserError(
            f"normalize must be mean/std, as in 0.1307/0.3081 or 0.49,0.48,0.45/0.25,0.24,0.26, "
            f"or one of {', '.join(KNOWN)}, not {text!r}."
        ) from None
    if not all(_LEAST <= number <= _MOST for number in stds):
        raise UserError(f"normalize has the standard deviation {std}: it must be greater than 0.")
    return Normalization(means, stds)


def _read_numbers(text: str) -> tuple[float, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", word) for word in words):
        raise ValueError
    numbers = tuple(float(word) for word in words)
    if not all(abs(number) <= _MOST for number in numbers):
        raise ValueError
    return numbers


def check_images(option: str, x: Tensor, name: str) -> None:
    """Refuse an option that is for images if the samples are something else."""
    if x.ndim != 4 or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise UserError(
            f"{option} is for images (channels × height × width), and the samples of {name} are "
            f"{_describe(x)}."
        )


def _describe(x: Tensor) -> str:
    shape = "×".join(map(str, x.shape[1:]))
    return f"{str(x.dtype).removeprefix('torch.')} of shape {shape}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
