"""The transport on its own: requests, checked results, and what it remembers."""

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.hostile import TRAIN  # noqa: E402
from flower.inprocess import CUSTOM, RUN, InProcessGrid  # noqa: E402

from fedala.flower import client_app  # noqa: E402
from fedala.flower.experiment import Deployment, prepare_server, read_run_config  # noqa: E402
from fedala.flower.nodes import Nodes  # noqa: E402
from fedala.flower.transport import FlowerTransport  # noqa: E402
from fedala.simulation.rounds import RoundRequest  # noqa: E402

TRAINING = RoundRequest(1, train=True, evaluates=True)


@pytest.fixture
def experiment():
    config, _ = read_run_config({"clients": 3, "method": "fedala", **RUN})
    return prepare_server(config, CUSTOM)


@pytest.fixture
def model(experiment):
    return experiment.start(RUN["seed"])


@pytest.fixture
def grid(tmp_path):
    run_config = {"clients": 3, "method": "fedala", **RUN}
    return InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)


@pytest.fixture
def transport(grid, experiment, model):
    deployment = Deployment(start_timeout=1, round_timeout=0.01)
    notes = experiment.method.notes
    transport = FlowerTransport(Nodes(grid, 3, 3), deployment, model, ["test"], notes)
    transport.wait_until_ready()
    grid.sent.clear()
    return transport


def read_config(message, key):
    return message.content["config"][key]


def test_results_come_in_client_order_with_uploads_and_scores(transport, model):
    results = list(transport.exchange(TRAINING, {2: model, 0: model}))
    assert [result.lanes for result in results] == [[(0, 0)], [(0, 2)]]
    for result in results:
        assert result.finite
        assert {name: value.shape for name, value in result.upload.items()} == {
            name: value.shape for name, value in model.items()
        }
        assert result.scores[0].shape == (1, 3)


def test_clients_that_share_a_model_share_its_record(transport, grid, model):
    other = {name: value.clone() for name, value in model.items()}
    list(transport.exchange(TRAINING, {0: model, 1: other, 2: model}))
    records = [message.content["arrays"] for message in grid.sent]
    assert records[0] is records[2]
    assert records[0] is not records[1]


def test_a_bad_reply_is_dropped_with_one_line(transport, grid, model, caplog):
    caplog.set_level("WARNING", "flwr")
    spoil = TRAIN["an array of NaN"]
    grid.alter_reply = lambda sent, reply: (
        spoil(reply) if sent.metadata.dst_node_id == 101 else reply
    )
    results = list(transport.exchange(TRAINING, dict.fromkeys(range(3), model)))
    assert [result.lanes for result in results] == [[(0, 0)], [(0, 2)]]
    [record] = caplog.records
    assert record.getMessage() == (
        "Round 1: the update of client 1 (node 101) is dropped: out.bias is not finite."
    )


def test_clients_score_the_received_model_as_it_is(transport, grid, model):
    request = RoundRequest(1, train=False, evaluates=True)
    [result] = transport.exchange(request, {0: model}, scores_received=True)
    assert [message.metadata.message_type for message in grid.sent] == ["evaluate.received"]
    assert not grid.replies[-1].content["arrays"]
    assert result.scores[0].shape == (1, 3)


def test_a_client_continues_from_its_last_confirmed_round(transport, grid, model):
    list(transport.exchange(TRAINING, dict.fromkeys(range(3), model)))
    transport.confirm(1, [0, 1])
    transport.reset(1)
    grid.sent.clear()
    second = RoundRequest(2, train=True, evaluates=True)
    list(transport.exchange(second, dict.fromkeys(range(3), model)))
    assert [read_config(message, "since") for message in grid.sent] == [1, 0, 0]


def test_a_restart_restores_rounds_and_owners(transport, grid):
    transport.confirm(3, [2])
    transport.nodes.owners[0] = 2**64 - 7  # node ids have 64 bits
    state = transport.state()
    assert state["counted"].tolist() == [[2, 3]]
    nodes = Nodes(grid, 3, 3)
    other = FlowerTransport(nodes, transport.deployment, transport.template, ["test"], ())
    other.restore(3, state)
    assert other.counted == {2: 3}
    assert nodes.owners == {0: 2**64 - 7, 1: 101, 2: 102}


@pytest.mark.parametrize("counted", [[[7, 1]], [[0, 4]], [[0, 0]]])
def test_the_state_of_another_federation_is_refused(counted, transport):
    with pytest.raises(ValueError, match="another federation"):
        transport.restore(3, {**transport.state(), "counted": torch.tensor(counted)})
    assert transport.counted == {}
