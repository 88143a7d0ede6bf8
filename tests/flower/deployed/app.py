"""The app of test_deployment.py: small data and a small model; a node that is told to poisons what it uploads."""

from flower.inprocess import OWN
from flower.poison import poison

from fedala.flower import client_app, server_app


def poisons(message, context, call_next):
    reply = call_next(message, context)
    if (how := context.node_config.get("poison")) and message.metadata.message_type == "train":
        poison(reply.content["arrays"], how)
    return reply


client = client_app(OWN, mods=[poisons])
server = server_app(OWN)
