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
from fedala.lanes import Message  # noqa: E402
from fedala.simulation.client_round import CohortResult, RoundRequest  # noqa: E402
from fedala.simulation.transport import Setup  # noqa: E402

TRAINING = RoundRequest(1, train=True, evaluate=True)
EVERYBODY = [0, 1, 2]


@pytest.fixture
def experiment():
    config, _ = read_run_config({"clients": 3, "method": "fedala", **RUN})
    return prepare_server(config, CUSTOM)


@pytest.fixture
def model(experiment):
    return experiment.start(RUN["seed"])


@pytest.fixture
def setup(experiment, model):
    return Setup(experiment.method, experiment.task, [model], [RUN["seed"]], 3, 1.0, ["test"])


@pytest.fixture
def grid(tmp_path):
    run_config = {"clients": 3, "method": "fedala", **RUN}
    return InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)


@pytest.fixture
def transport(grid, setup):
    deployment = Deployment(start_timeout=1, round_timeout=0.01)
    transport = FlowerTransport(setup, Nodes(grid, 3, 3), deployment)
    transport.begin_round()
    grid.sent.clear()
    return transport


def run_round(transport, model, clients, request=TRAINING):
    return list(transport.run_round(request, [Message(model)], [clients]))


def read_config(message, key):
    return message.content["config"][key]


def test_before_a_round_the_task_learns_the_sizes_of_the_clients(transport, setup):
    assert [setup.task.size(client) for client in EVERYBODY] == [30, 17, 23]
    assert [setup.task.size(client, "test") for client in EVERYBODY] == [10, 6, 8]
    assert [setup.task.size(client, "validation") for client in EVERYBODY] == [0, 0, 0]


def test_results_come_in_client_order_with_uploads_and_scores(transport, model):
    results = run_round(transport, model, [2, 0])
    assert [result.lanes for result in results] == [[(0, 0)], [(0, 2)]]
    for result in results:
        assert result.is_finite
        assert {name: value.shape for name, value in result.upload.model.items()} == {
            name: value.shape for name, value in model.items()
        }
        assert result.upload.extra == {}
        assert result.scores[0].shape == (1, 3)


def test_clients_that_share_a_model_share_its_record(transport, grid, model):
    run_round(transport, model, EVERYBODY)
    records = [message.content["arrays"] for message in grid.sent]
    assert records[0] is records[1]
    assert records[0] is records[2]


def test_a_client_gets_only_its_own_lane_of_a_message(transport, grid, model):
    lanes = torch.arange(3.0)
    model = {**model, "out.bias": model["out.bias"] * 0 + lanes.view(3, 1)}
    others = {name: value.expand(3, *value.shape[1:]) for name, value in model.items()}
    run_round(transport, others, [2, 0, 1])  # the lanes follow the participants
    for message in grid.sent:
        lane = {102: 0, 100: 1, 101: 2}[message.metadata.dst_node_id]
        record = message.content["arrays"]
        assert record["out.bias"].numpy().tolist() == [lane] * 3
        assert record["conv.weight"].shape == (3, 1, 3, 3)


def test_a_bad_reply_is_dropped_with_one_line(transport, grid, model, caplog):
    caplog.set_level("WARNING", "flwr")
    spoil = TRAIN["an array of NaN"]
    grid.alter_reply = lambda sent, reply: (
        spoil(reply) if sent.metadata.dst_node_id == 101 else reply
    )
    results = run_round(transport, model, EVERYBODY)
    assert [result.lanes for result in results] == [[(0, 0)], [(0, 2)]]
    [record] = caplog.records
    assert record.getMessage() == (
        "Round 1: the update of client 1 (node 101) is dropped: out.bias is not finite."
    )


def test_each_answer_is_forgotten_once_it_is_decoded(transport, model, monkeypatch):
    """Otherwise the server would hold every upload twice, encoded and decoded."""
    exchange, answers = transport.nodes.exchange, {}

    def keep_answers(*arguments):
        answers.update(exchange(*arguments))
        return answers

    monkeypatch.setattr(transport.nodes, "exchange", keep_answers)
    results = transport.run_round(TRAINING, [Message(model)], [EVERYBODY])
    assert [list(answers) for _ in results] == [[1, 2], [2], []]


def test_clients_score_the_received_model_as_it_is(transport, grid, model):
    [result] = transport.score_models(1, [model], [[0]])
    assert [message.metadata.message_type for message in grid.sent] == ["evaluate.received"]
    assert grid.sent[0].content["arrays"].keys() == model.keys()
    assert not grid.replies[-1].content["arrays"]
    assert result.scores[0].shape == (1, 3)


def test_clients_make_the_initial_model_themselves(transport, grid, model):
    """Its scores equal those of the same model, sent."""
    [sent] = transport.score_models(1, [model], [[0]])
    [made] = transport.score_models(0, [model], [[0]])
    assert not grid.sent[-1].content["arrays"]
    assert torch.equal(sent.scores[0], made.scores[0])


def test_a_client_continues_from_its_last_confirmed_round(transport, grid, model):
    run_round(transport, model, EVERYBODY)
    transport.finish_round(1, {(0, 0), (0, 1)})
    diverged = CohortResult([(0, 1)], is_finite=torch.tensor([False]))
    transport.keep_states(diverged, "skip")
    assert transport.counted == {0: 1, 1: 1}
    transport.keep_states(diverged, "reset")
    assert transport.counted == {0: 1, 1: 1}  # until the round is over
    transport.finish_round(2, {(0, 0)})
    assert transport.counted == {0: 2}
    grid.sent.clear()
    run_round(transport, model, EVERYBODY, RoundRequest(3, train=True, evaluate=True))
    assert [read_config(message, "since") for message in grid.sent] == [2, 0, 0]


def test_a_restart_restores_rounds_and_owners(transport, grid, setup):
    transport.finish_round(3, {(0, 2)})
    transport.nodes.owners[0] = 2**64 - 7  # node ids have 64 bits
    state = transport.state()
    assert state["counted"].tolist() == [[2, 3]]
    nodes = Nodes(grid, 3, 3)
    other = FlowerTransport(setup, nodes, transport.deployment)
    other.restore(3, state)
    assert other.counted == {2: 3}
    assert nodes.owners == {0: 2**64 - 7, 1: 101, 2: 102}


@pytest.mark.parametrize("counted", [[[7, 1]], [[0, 4]], [[0, 0]]])
def test_the_state_of_another_federation_is_refused(counted, transport):
    with pytest.raises(ValueError, match="another federation"):
        transport.restore(3, {**transport.state(), "counted": torch.tensor(counted)})
    assert transport.counted == {}
