"""fedala on Flower: every method as a Flower app, and ALA for anybody's Flower app.

A client of a real federation is a cohort of one lane, and the server is the simulation's round loop with its clients
elsewhere: no method is written twice.
"""

from fedala.errors import UserError

try:
    import flwr  # noqa: F401
except ModuleNotFoundError:
    raise UserError("fedala on Flower needs flwr: pip install 'fedala[flower]'.") from None

from fedala.flower.mod import ala_mod, mods

__all__ = ["ala_mod", "mods"]
