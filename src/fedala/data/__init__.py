"""Data: load it by name or from files, partition it among clients, split every client's share.

federation = federate(load("digits"), "dir:0.1", clients=20)
"""

from fedala.data.catalogue import Known, known
from fedala.data.dataset import Dataset
from fedala.data.federation import Federation, federate, write_partition
from fedala.data.load import load
from fedala.data.partition import dirichlet, iid, partitioner, pathological

__all__ = [
    "Dataset",
    "Federation",
    "Known",
    "dirichlet",
    "federate",
    "iid",
    "known",
    "load",
    "partitioner",
    "pathological",
    "write_partition",
]
