"""The round loop: participation, the clients' part of a round, scores, divergence, aggregation."""

from fedala.simulation.rounds import Simulation

__all__ = ["Simulation"]
