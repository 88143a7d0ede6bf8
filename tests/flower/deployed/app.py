"""The app of test_deployment.py: small data and a small model; a node that is told to sends bad replies."""

from flower.hostile import OVER_TLS
from flower.inprocess import OWN
from flower.poison import poison

from fedala.flower import client_app, server_app


def poisons(message, context, call_next):
    reply = call_next(message, context)
    if (how := context.node_config.get("poison")) and message.metadata.message_type == "train":
        poison(reply.content["arrays"], how)
    round = int(message.metadata.group_id or 0)
    if (
        context.node_config.get("hostile")
        and message.metadata.message_type == "train"
        and round <= len(OVER_TLS)
    ):
        return OVER_TLS[round - 1][0](reply)
    return reply


client = client_app(OWN, mods=[poisons])
server = server_app(OWN)
