"""The server's part of a round: its state, what it sends, and what it makes of the uploads."""

from fedala.lanes import Message, Params, State, Task, Uploads
from fedala.methods import Method, ServerRound
from fedala.methods.given import forbid_changes
from fedala.methods.returned import check_aggregated, check_message


def init_server_state(
    method: Method, task: Task, shared: Params, server_round: ServerRound
) -> State:
    """Return a server's state before the first round; `shared` is what travels of Θ⁰."""
    with forbid_changes(method, "init_server", initial=shared):
        return method.init_server(task, shared, server_round)


def send_message(method: Method, server: State, server_round: ServerRound) -> Message:
    """Return what the server sends to the participants of a round."""
    with forbid_changes(method, "send", server=server):
        message = method.send(server, server_round)
    check_message(method, message, len(server_round.clients))
    return message


def aggregate_uploads(
    method: Method, server: State, uploads: Uploads, server_round: ServerRound
) -> State:
    """Return the server's state after a round."""
    messages = [piece.message for piece in uploads.pieces]
    with forbid_changes(method, "aggregate", server=server, uploads=messages):
        after = method.aggregate(server, uploads, server_round)
    return check_aggregated(method, server, after)
