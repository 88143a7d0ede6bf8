"""Personalised federated learning with Adaptive Local Aggregation (FedALA)."""

from fedala.ala import ALA
from fedala.config import Config
from fedala.errors import UserError
from fedala.running import Result, run

__all__ = ["ALA", "Config", "Result", "UserError", "run"]
