"""fedala on Flower: every method as a Flower app, and ALA for any Flower app.

A client of a real federation is a cohort of one lane. The server is the simulation's round loop
with its clients on other machines. So each method is written once.
"""

from fedala.errors import UserError

try:
    import flwr  # noqa: F401
except ModuleNotFoundError:
    raise UserError("fedala on Flower needs flwr: pip install 'fedala[flower]'.") from None

from fedala.flower.client import client_app
from fedala.flower.experiment import CustomApp
from fedala.flower.mod import ala_mod, order_mods
from fedala.flower.server import server_app
from fedala.flower.stored_states import load_personal

__all__ = ["CustomApp", "ala_mod", "client_app", "load_personal", "order_mods", "server_app"]
