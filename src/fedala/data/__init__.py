"""Load a dataset by its name or from files, divide it among clients, split each client's share.

federation = federate(load("digits"), "dir:0.1", clients=20)
"""

from fedala.data.catalogue import KnownDataset, known_datasets
from fedala.data.dataset import Dataset
from fedala.data.federation import Federation, default_partition, federate, write_partition
from fedala.data.holdout import hold_out_clients
from fedala.data.images import resize_images
from fedala.data.load import load
from fedala.data.partition import dirichlet, iid, partitioner, pathological

__all__ = [
    "Dataset",
    "Federation",
    "KnownDataset",
    "default_partition",
    "dirichlet",
    "federate",
    "hold_out_clients",
    "iid",
    "known_datasets",
    "load",
    "partitioner",
    "pathological",
    "resize_images",
    "write_partition",
]
