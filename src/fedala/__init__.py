"""Personalised federated learning with Adaptive Local Aggregation (FedALA)."""

from fedala.ala import ALA
from fedala.config import Config
from fedala.errors import UserError
from fedala.running import Result, run
from fedala.version import __version__

__all__ = ["ALA", "Config", "Result", "UserError", "__version__", "run"]
