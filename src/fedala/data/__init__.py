"""Load a dataset by its name or from files, divide it among clients, split each client's share.

federation = federate(load("digits"), "dir:0.1", clients=20)
"""

from fedala.data.catalogue import KnownDataset, known_datasets
from fedala.data.dataset import Dataset
from fedala.data.federation import Federation, default_partition, federate, write_partition
from fedala.data.from_python import make_dataset
from fedala.data.holdout import hold_out_clients
from fedala.data.images import resize_images
from fedala.data.load import load
from fedala.data.partition import (
    clustered,
    dirichlet,
    extended_dirichlet,
    iid,
    partitioner,
    pathological,
    quantity,
)

__all__ = [
    "Dataset",
    "Federation",
    "KnownDataset",
    "clustered",
    "default_partition",
    "dirichlet",
    "extended_dirichlet",
    "federate",
    "hold_out_clients",
    "iid",
    "known_datasets",
    "load",
    "make_dataset",
    "partitioner",
    "pathological",
    "quantity",
    "resize_images",
    "write_partition",
]
