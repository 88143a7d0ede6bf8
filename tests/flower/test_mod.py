"""ALA in anybody's Flower app: what it does to what is received, kept and uploaded."""

import copy
import importlib.util
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import Here  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402

from fedala import ALA, UserError  # noqa: E402
from fedala.flower import ala_mod, mods  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flower_ala_mod", ROOT / "examples" / "flower_ala_mod" / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def federate(example, app, tmp_path, rounds=4, strategy=None):
    """Flower's own FedAvg over two clients; the messages that went by, and the result."""
    grid = Here(app, 2, tmp_path)
    torch.manual_seed(0)
    start = ArrayRecord(example.make_model().state_dict())
    strategy = strategy or FedAvg(fraction_evaluate=0.0)
    return grid, strategy.start(grid, start, num_rounds=rounds)


def test_the_example_is_better_after_than_before(example, tmp_path):
    _, before = federate(example, example.before, tmp_path / "before")
    _, after = federate(example, example.after, tmp_path / "after")
    accuracies = [result.train_metrics_clientapp[4]["accuracy"] for result in (before, after)]
    assert accuracies[1] > accuracies[0] + 0.2


def test_a_client_does_what_it_would_do_in_its_own_loop(example, tmp_path):
    """The same rounds by hand, with `fedala.ALA`: the same uploads."""
    grid, _ = federate(example, example.after, tmp_path)
    contexts = [Context(1, 100 + i, {"partition-id": i}, RecordDict(), {}) for i in range(2)]
    data = [example.load_data(context) for context in contexts]
    torch.manual_seed(0)
    server = example.make_model()
    locals_ = [copy.deepcopy(server) for _ in data]
    alas = [ALA(layers=1) for _ in data]
    for _ in range(4):
        for ala, local, (x, y) in zip(alas, locals_, data, strict=True):
            ala.initialize(local, server, (x, y))
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            for i in range(0, len(x), 10):
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(x[i : i + 10]), y[i : i + 10]).backward()
                optimizer.step()
        states = [local.state_dict() for local in locals_]
        server.load_state_dict({name: sum(state[name] for state in states) / 2 for name in states[0]})
    uploads = {reply.metadata.src_node_id: reply.content["arrays"].to_torch_state_dict() for reply in grid.replies}
    for i, local in enumerate(locals_):
        for name, value in local.state_dict().items():
            torch.testing.assert_close(uploads[100 + i][name], value, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def _sender(tmp_path):
    Here(ClientApp(), 0, tmp_path)


def message_with(arrays, kind="train", **config):
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    return Message(content, dst_node_id=7, message_type=kind)


def context_at(tmp_path, **node_config):
    return Context(1, 7, {"partition-id": 0, "state-dir": str(tmp_path), **node_config}, RecordDict(), {})


def moving_app(example, *around):
    """An app whose training moves every parameter by a step, so that all of it is seen: the update is known."""
    app = ClientApp(mods=list(around))

    def train(message, context):
        seen = message.content["arrays"].to_torch_state_dict()
        moved = ArrayRecord({name: value + 0.5 for name, value in seen.items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    app.train()(train)
    app.evaluate()(lambda message, context: Message(message.content, reply_to=message))
    return app


def distance(a, b):
    return np.sqrt(sum(np.sum((x - y) ** 2) for x, y in zip(a.to_numpy_ndarrays(), b.to_numpy_ndarrays(), strict=True)))


def uploads_under_clipping(example, tmp_path, order):
    """The norms of three rounds' updates, as the server would measure them, under a clipping mod with the bound 0.1."""
    app, norms = moving_app(example, *order), []
    for round in range(3):
        torch.manual_seed(round)
        sent = ArrayRecord(example.make_model().state_dict())
        reply = app(message_with(sent, clipping_norm=0.1), context_at(tmp_path))
        norms.append(distance(reply.content["arrays"], sent))
    return norms


def test_a_clipping_mod_still_bounds_what_is_uploaded(example, tmp_path):
    ala = ala_mod(example.setup, layers=1)
    order = mods(ala, fixedclipping_mod)
    assert order == [fixedclipping_mod, ala]
    assert max(uploads_under_clipping(example, tmp_path / "right", order)) <= 0.1 * (1 + 1e-5)
    # And this is why the order matters.
    assert max(uploads_under_clipping(example, tmp_path / "wrong", [ala, fixedclipping_mod])) > 0.2


def test_two_ala_mods_are_refused(example):
    with pytest.raises(UserError, match="one ALA mod"):
        mods(ala_mod(example.setup), ala_mod(example.setup))


def test_wrong_settings_are_refused_before_any_message(example):
    with pytest.raises(UserError, match="eta"):
        ala_mod(example.setup, eta=-1)


def test_only_train_messages_are_touched(example, tmp_path):
    app = moving_app(example, ala_mod(example.setup))
    sent = ArrayRecord(example.make_model().state_dict())
    app(message_with(sent), context_at(tmp_path))
    other = ArrayRecord(example.make_model().state_dict())
    reply = app(message_with(other, "evaluate"), context_at(tmp_path))
    assert distance(reply.content["arrays"], other) == 0


def test_the_lower_layers_are_the_received_ones_and_the_message_stays_as_it_was(example, tmp_path):
    seen = []

    def spy(message, context, call_next):
        seen.append(message.content["arrays"])
        return call_next(message, context)

    app = ClientApp(mods=[ala_mod(example.setup), spy])
    app.train()(example.train)
    for seed in range(2):
        torch.manual_seed(seed)
        message = message_with(ArrayRecord(example.make_model().state_dict()))
        sent = message.content["arrays"]
        app(message, context_at(tmp_path))
        assert message.content["arrays"] is sent
    received, initialized = sent.to_torch_state_dict(), seen[1].to_torch_state_dict()
    assert all(torch.equal(initialized[name], received[name]) for name in ("0.weight", "0.bias"))
    assert not torch.equal(initialized["2.weight"], received["2.weight"])


def test_its_state_is_private_and_survives_a_new_process(example, tmp_path):
    """What a second app makes of the second round depends on what the first one kept, in files that only the owner reads."""
    os.umask(0o022)
    sent = []
    for seed in range(2):
        torch.manual_seed(seed)
        sent.append(ArrayRecord(example.make_model().state_dict()))

    def last(*apps_and_folders):
        for arrays, (app, folder) in zip(sent, apps_and_folders, strict=True):
            reply = app(message_with(arrays), context_at(folder))
        return reply.content["arrays"]

    one, two = (moving_app(example, ala_mod(example.setup)) for _ in range(2))
    together = last((one, tmp_path / "a"), (one, tmp_path / "a"))
    restarted = last((one, tmp_path / "b"), (two, tmp_path / "b"))
    forgotten = last((one, tmp_path / "c"), (two, tmp_path / "d"))
    assert distance(together, restarted) == 0
    assert distance(together, forgotten) > 0.1
    [file] = (tmp_path / "a").rglob("*.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in [file.parent, *file.parents[1:3]]} == {0o700}


def test_counters_that_averaging_made_fractions_of_are_survived(tmp_path):
    def setup(context):
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4)), (torch.randn(20, 2), torch.randint(0, 4, (20,)))

    app = moving_app(None, ala_mod(setup))
    for _ in range(2):
        arrays = ArrayRecord(setup(None)[0].state_dict())
        arrays["0.num_batches_tracked"] = Array(np.array(2.5))
        reply = app(message_with(arrays), context_at(tmp_path))
        assert reply.content["arrays"]["0.num_batches_tracked"].numpy() == 3.0


def test_a_model_that_is_not_the_servers_is_refused(example, tmp_path):
    app = moving_app(example, ala_mod(lambda context: (nn.Linear(2, 4), example.load_data(context))))
    with pytest.raises(UserError, match=r"does not have 0\.weight"):
        app(message_with(ArrayRecord(example.make_model().state_dict())), context_at(tmp_path))


def test_arrays_without_names_are_known_by_their_place(example, tmp_path):
    app = moving_app(example, ala_mod(example.setup))
    named = []
    for folder, make in (("names", lambda m: m.state_dict()), ("places", lambda m: [*map(np.asarray, m.parameters())])):
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.no_grad():
                arrays = ArrayRecord(make(example.make_model().requires_grad_(False)))
            reply = app(message_with(arrays), context_at(tmp_path / folder))
        named.append(reply.content["arrays"])
    assert distance(*named) == 0
