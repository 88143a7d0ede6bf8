"""Small runs whose models the tests load."""

import numpy as np
import torch
from torch import nn

import fedala
from fedala.data import Dataset

RANDOM = np.random.default_rng(0)
Y = np.arange(60) % 4
PIXELS = (RANDOM.integers(0, 120, (60, 1, 16, 16)) + Y[:, None, None, None] * 30).astype(np.uint8)
NAMES = ("ant", "bee", "cat", "dog")
OPTIONS = {
    "clients": 3,
    "partition": "iid",
    "rounds": 1,
    "device": "cpu",
    "lr": 0.05,
    "checkpoint_every": 0,
    "lanes": "1",  # a lane alone computes as a single model does, to the last bit
}


def images(names=NAMES):
    return Dataset("images", torch.from_numpy(PIXELS), torch.from_numpy(Y), 4, names)


def features(targets, classes, names=()):
    x = torch.from_numpy(RANDOM.normal(size=(len(targets), 5))).float()
    return Dataset("features", x, targets, classes, names)


def linear(outputs):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, outputs))


def run(out, dataset=None, **options):
    return fedala.run(
        dataset=images() if dataset is None else dataset,
        out=out,
        **{"method": "fedrep", **OPTIONS, **options},
    )
