"""Tensors besides the model travel in both directions. Bad ones cost only their own update."""

from dataclasses import replace

import numpy as np
import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower import hostile  # noqa: E402
from flower.controlled import Controlled, SlashedNet  # noqa: E402
from flower.inprocess import (  # noqa: E402
    CUSTOM,
    RUN,
    InProcessGrid,
    build_federation,
    run_in_process,
)
from flower.test_hostile import check_equivalence  # noqa: E402
from flower.test_parity import assert_same_models, assert_same_rows, load_models  # noqa: E402
from small import Net  # noqa: E402

import fedala  # noqa: E402
from fedala.errors import UserError  # noqa: E402
from fedala.flower import client_app  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.lanes import Message  # noqa: E402
from fedala.methods import catalogue, register, registry  # noqa: E402


@pytest.fixture(autouse=True)
def _do_not_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr("fedala.io.files.flush", lambda descriptor: None)
    monkeypatch.setattr("fedala.io.files.flush_folder", lambda folder: None)


@pytest.fixture(autouse=True)
def _controlled():
    """Register the method, and forget it afterwards."""
    register(Controlled)
    yield
    del registry._classes()["controlled"]
    catalogue.cache_clear()


@pytest.mark.parametrize("join_ratio", [1.0, 0.7])
def test_a_federation_with_extra_tensors_equals_the_simulation(join_ratio, tmp_path):
    options = {"method": "controlled", "precision": "float64", "join_ratio": join_ratio}
    grid, federated = run_in_process(tmp_path, **options)
    simulated = fedala.run(dataset=build_federation(), model=Net, lanes="1", **RUN, **options)
    assert_same_rows(federated.history, simulated.history)
    there = load_models(tmp_path)
    here = {key: model for key, model in simulated.models.items() if key[1] in there}
    assert {None, 0} < there.keys()  # a client has a file if it took part in the last round
    assert_same_models(there, here, 1e-10)
    names = {f"+extra/control/moves/{name}" for name, _ in Net().named_parameters()}
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    for message in [*trained, *grid.replies]:
        for record in message.content.array_records.values():
            if record:
                assert set(record) == {*Net().state_dict(), *names, "+extra/joined"}


def test_the_extra_tensors_of_the_server_arrive_at_each_client(tmp_path):
    """The method counts the clients that took part: 0, then 3, 6 and 9."""
    grid, _ = run_in_process(tmp_path, method="controlled")
    joined = {}
    for message in grid.sent:
        for record in message.content.array_records.values():
            count = int(record["+extra/joined"].numpy())
            joined.setdefault(message.metadata.group_id, []).append(count)
    assert joined == {"1": [0] * 3, "2": [3] * 3, "3": [6] * 3, "4": [9] * 3}


def test_bad_extra_tensors_cost_only_their_own_update(tmp_path, caplog):
    kinds = hostile.EXTRAS
    check_equivalence(tmp_path, caplog, kinds, "train", method="controlled", rounds=len(kinds) + 1)


def test_a_method_that_uploads_other_tensors_than_it_announced_is_refused(tmp_path, caplog):
    """Here as in a simulation, before any client has anything to do."""

    class Undeclared(Controlled):
        def train(self, cohort, initialized, received, state):
            upload, state = super().train(cohort, initialized, received, state)
            return Message(upload.model, {"joined": upload.extra["joined"]}), state

    registry._classes()["controlled"] = Undeclared
    options = {"method": "controlled", "rounds": 1}
    with pytest.raises(
        UserError, match="Controlled: train returns nothing under 'extra/control/moves/"
    ):
        fedala.run(dataset=build_federation(), model=Net, lanes="1", **{**RUN, **options})
    with pytest.raises(
        UserError, match="Controlled: train returns nothing under 'extra/control/moves/"
    ):
        run_in_process(tmp_path, **options, round_timeout=0.01)


# --- max_norm ---


def federate(tmp_path, name, value, method="controlled", **options):
    """Run a federation in which client 1 uploads a value as all numbers of one tensor."""
    run_config = {"clients": 3, "min_nodes": 3, "out": str(tmp_path / "runs"), "method": method}
    run_config |= {**RUN, "rounds": 1, **options}
    grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)

    def alter_reply(sent, reply):
        if sent.metadata.dst_node_id == 101 and sent.metadata.message_type == "train":
            shape = reply.content["arrays"][name].shape
            hostile.with_array(name, np.full(shape, value, np.float32))(reply)
        return reply

    grid.alter_reply = alter_reply
    serve(grid, run_config, CUSTOM)


@pytest.mark.parametrize(
    ("name", "dropped"), [("out.bias", 1), (hostile.MOVE, 0)], ids=["the model", "an extra tensor"]
)
def test_max_norm_measures_only_the_model(name, dropped, tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    federate(tmp_path, name, 1e6, max_norm=100.0)
    assert caplog.text.count("away from the model that was sent, but max_norm is 100") == dropped
    assert caplog.text.count("is dropped") == dropped


# --- names ---


@pytest.mark.parametrize("method", ["fedavg", "fedala", "fedrep", "apple"])
def test_the_names_of_parameters_may_contain_slashes(method, tmp_path):
    options = {"method": method, "precision": "float64"}
    custom = replace(CUSTOM, model=SlashedNet)
    _, federated = run_in_process(tmp_path, custom=custom, **options)
    simulated = fedala.run(
        dataset=build_federation(), model=SlashedNet, lanes="1", **RUN, **options
    )
    assert_same_rows(federated.history, simulated.history)
    assert_same_models(load_models(tmp_path), simulated.models, 1e-10)


def test_extra_tensors_cannot_be_named_after_parameters_with_slashes(tmp_path):
    """The run ends before a client trains, with a sentence that quotes the name."""
    with pytest.raises(UserError, match=r"The name 'a/conv.weight' of an extra tensor"):
        run_in_process(tmp_path, custom=replace(CUSTOM, model=SlashedNet), method="controlled")
