"""fedala on Flower: every method as a Flower app, and ALA for anybody's Flower app.

A client of a real federation is a cohort of one lane, and the server is the simulation's round loop with its clients
elsewhere: no method is written twice.
"""

from fedala.errors import UserError

try:
    import flwr  # noqa: F401
except ModuleNotFoundError:
    raise UserError("fedala on Flower needs flwr: pip install 'fedala[flower]'.") from None

from fedala.flower.client import client_app
from fedala.flower.experiment import Own
from fedala.flower.mod import ala_mod, mods
from fedala.flower.server import server_app

__all__ = ["Own", "ala_mod", "client_app", "mods", "server_app"]
