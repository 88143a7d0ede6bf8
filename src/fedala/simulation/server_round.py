"""The server's part of a round: its state, what it sends, and what it makes of the uploads."""

from fedala.errors import MethodError
from fedala.lanes import Message, Params, State, Task, Uploads
from fedala.methods import Method, ServerRound
from fedala.methods.given import forbid_changes
from fedala.methods.returned import check_aggregated, check_message, check_tensors
from fedala.methods.wrapper import unwrap


def init_server_state(
    method: Method, task: Task, shared: Params, server_round: ServerRound
) -> State:
    """Return a server's state before the first round; `shared` is what travels of Θ⁰."""
    with forbid_changes(method, "init_server", initial=shared):
        found = method.init_server(task, shared, server_round)
    state = check_tensors(method, "init_server", found, wanted="the server's state, a dict")
    if "global" not in state and type(unwrap(method)).send is Method.send:
        raise MethodError(
            f"{method.title}: init_server returns nothing under 'global', which is what the "
            "server sends if the class does not override send."
        )
    return state


def send_message(method: Method, server: State, server_round: ServerRound) -> Message:
    """Return what the server sends to the participants of a round."""
    with forbid_changes(method, "send", server=server):
        message = method.send(server, server_round)
    return check_message(method, message, len(server_round.clients))


def aggregate_uploads(
    method: Method, server: State, uploads: Uploads, server_round: ServerRound
) -> State:
    """Return the server's state after a round."""
    messages = [piece.message for piece in uploads.pieces]
    with forbid_changes(method, "aggregate", server=server, uploads=messages):
        after = method.aggregate(server, uploads, server_round)
    return check_aggregated(method, server, after)


def get_global_model(method: Method, server: State) -> Params:
    """Return the global model of a server, as one lane; empty if the method has none."""
    found = method.global_model(server)
    return check_tensors(method, "global_model", found, lanes=1, wanted="a model, a dict")
