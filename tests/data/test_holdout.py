"""Held-out clients get the last numbers, and the data follow."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedala.data import Dataset, Federation, hold_out_clients
from fedala.errors import UserError


def make_federation() -> Federation:
    """Five clients of two training samples and a test sample each."""
    data = Dataset("own", torch.zeros(15, 2), torch.arange(15) % 3, 3)
    rows = [np.arange(3 * client, 3 * client + 3) for client in range(5)]
    parts = [tuple(own[:2] for own in rows), tuple(own[2:] for own in rows)]
    return Federation(data, *parts, tuple(own[:0] for own in rows))


def test_holding_out_clients_renumbers_them_and_their_names():
    federation = make_federation()
    natural = replace(federation, client_names=tuple("abcde"))
    found = hold_out_clients(natural, "0.4", 3)
    known = [client for client in range(5) if client not in found.original[3:]]
    assert found.held_out == 2
    assert list(found.original[:3]) == known
    for client, before in enumerate(found.original):
        assert found.client_names[client] == "abcde"[before]
        assert found.train[client] is natural.train[before]
    assert hold_out_clients(federation, "last:2").original == ()
    assert len(found.known.train) == len(found.known.client_names) == 3


@pytest.mark.parametrize("which", ["0", "1.5", "-1", "all", "last:", "last:x", "5", "last:5"])
def test_a_holdout_that_means_nothing_is_refused(which):
    with pytest.raises(UserError, match="holdout_clients"):
        hold_out_clients(make_federation(), which)
