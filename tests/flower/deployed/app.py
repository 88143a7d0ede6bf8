"""The app of test_deployment.py: small data and a small model.

A node whose config has `poison` or `hostile` sends bad replies.
"""

from flower.hostile import OVER_TLS
from flower.inprocess import CUSTOM
from flower.poison import poison

from fedala.flower import client_app, server_app


def spoil_reply(message, context, call_next):
    reply = call_next(message, context)
    if message.metadata.message_type != "train":
        return reply
    if how := context.node_config.get("poison"):
        poison(reply.content["arrays"], how)
    round = int(message.metadata.group_id or 0)
    if context.node_config.get("hostile") and round <= len(OVER_TLS):
        return OVER_TLS[round - 1][0](reply)
    return reply


client = client_app(CUSTOM, mods=[spoil_reply])
server = server_app(CUSTOM)
