"""ALA in anybody's Flower app: what it does to what is received, kept and uploaded."""

import copy
import importlib.util
import logging
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
from flwr.client import NumPyClient  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters, parameters_to_ndarrays  # noqa: E402
from flwr.compat.common import recorddict_compat as compat  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402

from fedala import ALA, UserError  # noqa: E402
from fedala.flower import ala_mod, mods  # noqa: E402
from fedala.io.tensor_files import load, save  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(
        "flower_ala_mod", ROOT / "examples" / "flower_ala_mod" / "app.py"
    )
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
        server.load_state_dict(
            {name: sum(state[name] for state in states) / 2 for name in states[0]}
        )
    uploads = {
        reply.metadata.src_node_id: reply.content["arrays"].to_torch_state_dict()
        for reply in grid.replies
    }
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
    return Context(
        1, 7, {"partition-id": 0, "state-dir": str(tmp_path), **node_config}, RecordDict(), {}
    )


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
    return np.sqrt(
        sum(
            np.sum((x - y) ** 2)
            for x, y in zip(a.to_numpy_ndarrays(), b.to_numpy_ndarrays(), strict=True)
        )
    )


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
    assert {
        stat.S_IMODE(folder.stat().st_mode) for folder in [file.parent, *file.parents[1:3]]
    } == {0o700}


def test_counters_that_averaging_made_fractions_of_are_survived(tmp_path):
    def setup(context):
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4)), (
            torch.randn(20, 2),
            torch.randint(0, 4, (20,)),
        )

    app = moving_app(None, ala_mod(setup))
    for _ in range(2):
        arrays = ArrayRecord(setup(None)[0].state_dict())
        arrays["0.num_batches_tracked"] = Array(np.array(2.5))
        reply = app(message_with(arrays), context_at(tmp_path))
        assert reply.content["arrays"]["0.num_batches_tracked"].numpy() == 3.0


def test_a_model_that_is_not_the_servers_is_refused(example, tmp_path):
    app = moving_app(
        example, ala_mod(lambda context: (nn.Linear(2, 4), example.load_data(context)))
    )
    with pytest.raises(UserError, match=r"does not have 0\.weight"):
        app(message_with(ArrayRecord(example.make_model().state_dict())), context_at(tmp_path))


def test_arrays_without_names_are_known_by_their_place(example, tmp_path):
    app = moving_app(example, ala_mod(example.setup))
    named = []
    for folder, make in (
        ("names", lambda m: m.state_dict()),
        ("places", lambda m: [*map(np.asarray, m.parameters())]),
    ):
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.no_grad():
                arrays = ArrayRecord(make(example.make_model().requires_grad_(False)))
            reply = app(message_with(arrays), context_at(tmp_path / folder))
        named.append(reply.content["arrays"])
    assert distance(*named) == 0


# --- the legacy API ------------------------------------------------------------------------------------------------------


def legacy_app(example, *around, returns=lambda arrays, round: arrays):
    """A `NumPyClient` behind a `client_fn`, as Flower's older examples have it."""

    class Client(NumPyClient):
        def __init__(self, context):
            self.context, self.model = context, example.make_model()

        def fit(self, parameters, config):
            names = self.model.state_dict()
            arrays = zip(names, map(torch.from_numpy, parameters), strict=True)
            message = Message(
                RecordDict({"arrays": ArrayRecord(dict(arrays))}),
                dst_node_id=7,
                message_type="train",
            )
            content = example.train(message, self.context).content
            trained = returns(content["arrays"].to_numpy_ndarrays(), config["round"])
            return (
                trained,
                200,
                {"accuracy": content["metrics"]["accuracy"], "note": "text is allowed here"},
            )

        def evaluate(self, parameters, config):
            return 0.5, 200, {"sum": float(sum(p.sum() for p in parameters))}

    return ClientApp(client_fn=lambda context: Client(context).to_client(), mods=list(around))


def fit(app, arrays, round, folder):
    """A legacy server's `fit`, as its `GridClientProxy` asks for it: through messages without types and shapes."""
    ins = FitIns(ndarrays_to_parameters(arrays), {"round": round, "rate": 0.1, "name": "x"})
    message = Message(
        compat.fitins_to_recorddict(ins, keep_input=True), dst_node_id=7, message_type="train"
    )
    assert {array.dtype for array in message.content["fitins.parameters"].values()} == {""}
    reply = app(message, context_at(folder))
    return compat.recorddict_to_fitres(reply.content, keep_input=True)


def test_a_legacy_numpy_client_does_what_an_app_of_today_does(example, tmp_path):
    old, new = legacy_app(example, ala_mod(example.setup, layers=1)), example.after
    for round in range(3):
        torch.manual_seed(round)
        model = example.make_model()
        result = fit(
            old, [value.numpy() for value in model.state_dict().values()], round, tmp_path / "old"
        )
        reply = new(message_with(ArrayRecord(model.state_dict())), context_at(tmp_path / "new"))
        expected = reply.content["arrays"].to_numpy_ndarrays()
        for found, value in zip(parameters_to_ndarrays(result.parameters), expected, strict=True):
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)
        assert result.num_examples == 200
        assert result.metrics["accuracy"] == reply.content["metrics"]["accuracy"]
        assert (result.metrics["note"], result.metrics["ala-fault"]) == ("text is allowed here", 0)
    # ALA had a part in it: without it, training starts elsewhere.
    plain = fit(
        legacy_app(example), [value.numpy() for value in model.state_dict().values()], 2, tmp_path
    )
    assert not np.array_equal(parameters_to_ndarrays(plain.parameters)[2], expected[2])
    assert "ala-fault" not in plain.metrics


def test_other_legacy_messages_go_by(example, tmp_path):
    app = legacy_app(example, ala_mod(example.setup))
    ins = EvaluateIns(ndarrays_to_parameters([np.ones(3)]), {})
    message = Message(
        compat.evaluateins_to_recorddict(ins, True), dst_node_id=7, message_type="evaluate"
    )
    assert compat.recorddict_to_evaluateres(app(message, context_at(tmp_path)).content).metrics == {
        "sum": 3.0
    }


def test_a_legacy_client_that_returns_no_model_keeps_its_last_one(example, tmp_path):
    app = legacy_app(
        example, ala_mod(example.setup), returns=lambda arrays, round: [] if round == 1 else arrays
    )
    arrays = [value.numpy() for value in example.make_model().state_dict().values()]
    results = [fit(app, arrays, round, tmp_path) for round in range(3)]
    assert [result.metrics["ala-fault"] for result in results] == [0, 1, 0]
    assert [len(result.parameters.tensors) for result in results] == [4, 0, 4]


@pytest.mark.parametrize("arrays", [[], [np.array(["text"])] * 4])
def test_a_legacy_message_without_a_model_is_refused(example, tmp_path, arrays):
    with pytest.raises(UserError, match=r"no arrays|cannot be read"):
        fit(legacy_app(example, ala_mod(example.setup)), arrays, 0, tmp_path)


# --- numbers that are not finite -----------------------------------------------------------------------------------------


def rounds_with(example, folder, poison, caplog, rounds=4, where=1):
    """The replies of some rounds, in one of which something is not finite; and what the client had kept after each."""
    bad = {"now": False}

    def setup(context):
        model, (x, y) = example.setup(context)
        return model, (x * float("nan") if bad["now"] and poison == "data" else x, y)

    def spoil(message, context, call_next):
        reply = call_next(message, context)
        if bad["now"] and poison == "training":
            reply.content["arrays"]["2.weight"] = Array(
                reply.content["arrays"]["2.weight"].numpy() * np.nan
            )
        return reply

    app = ClientApp(mods=[ala_mod(setup, layers=1), spoil])
    app.train()(example.train)
    replies, kept = [], []
    for round in range(rounds):
        torch.manual_seed(round)
        arrays = ArrayRecord(example.make_model().state_dict())
        bad["now"] = round == where
        if bad["now"] and poison == "received":
            arrays["0.bias"] = Array(arrays["0.bias"].numpy() * np.inf)
        caplog.clear()
        replies.append(app(message_with(arrays), context_at(folder)).content)
        warned = any(
            record.levelname == "WARNING" and "not finite" in record.message
            for record in caplog.records
        )
        assert warned == bad["now"]
        [file] = folder.rglob("*.safetensors")
        kept.append(load(file)[0])
    return replies, kept


@pytest.mark.parametrize("poison", ["data", "received", "training"])
def test_one_bad_round_does_not_outlive_itself(example, tmp_path, caplog, monkeypatch, poison):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)  # so that caplog sees it
    replies, kept = rounds_with(example, tmp_path, poison, caplog)
    assert [reply["metrics"]["ala-fault"] for reply in replies] == [0, 1, 0, 0]
    for state in kept:
        assert all(value.isfinite().all() for part in state.values() for value in part.values())
    for name in ("weights.2.weight", "weights.2.bias"):
        assert torch.equal(kept[1]["ala"][name], kept[0]["ala"][name])
        assert not torch.equal(kept[3]["ala"][name], kept[0]["ala"][name])
    same = all(
        torch.equal(kept[1]["local"][name], value) for name, value in kept[0]["local"].items()
    )
    assert same == (poison == "training")
    finite = [
        all(np.isfinite(array).all() for array in reply["arrays"].to_numpy_ndarrays())
        for reply in replies
    ]
    assert finite == [True, poison != "training", True, True]


def test_a_first_model_that_is_not_finite_is_refused(example, tmp_path):
    arrays = ArrayRecord(example.make_model().state_dict())
    arrays["0.bias"] = Array(arrays["0.bias"].numpy() * np.nan)
    with pytest.raises(UserError, match=r"Neither model.*0\.bias"):
        moving_app(example, ala_mod(example.setup))(message_with(arrays), context_at(tmp_path))


def test_kept_weights_that_are_not_finite_are_learned_from_the_start(example, tmp_path):
    """States of an older version may hold them."""
    app = moving_app(example, ala_mod(example.setup))
    for seed in range(2):
        torch.manual_seed(seed)
        reply = app(
            message_with(ArrayRecord(example.make_model().state_dict())), context_at(tmp_path)
        )
        [file] = tmp_path.rglob("*.safetensors")
        state, about = load(file)
        if seed == 0:
            state["ala"]["weights.2.bias"] = torch.full((4,), float("nan"))
            state["ala"]["trained"] = torch.tensor(True)
            save(file, state, about, private=True)
    assert reply.content["metrics"]["ala-fault"] == 0
    assert state["ala"]["round"] == 2
    assert all(value.isfinite().all() for value in state["ala"].values())


def test_metrics_can_be_averaged_over_clients_with_and_without_a_fault(example, tmp_path):
    """Flower skips a round whose replies have different metrics, so every reply has this one."""

    def setup(context):
        model, (x, y) = example.setup(context)
        return model, (x * float("nan") if context.node_config["partition-id"] == 0 else x, y)

    app = ClientApp(mods=[ala_mod(setup, layers=1)])
    app.train()(example.train)
    _, result = federate(example, app, tmp_path, rounds=2)
    assert result.train_metrics_clientapp[2]["ala-fault"] == 0.5


def test_a_model_that_flattens_with_view_goes_through_the_mod(tmp_path):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(36, 4)

        def forward(self, x):
            return self.fc(self.conv(x).relu().view(-1, 36))

    data = torch.randn(20, 1, 5, 5), torch.randint(0, 4, (20,))
    app = moving_app(None, ala_mod(lambda context: (Views(), data)))
    for _ in range(2):
        reply = app(message_with(ArrayRecord(Views().state_dict())), context_at(tmp_path))
    [file] = tmp_path.rglob("*.safetensors")
    assert load(file)[0]["ala"]["trained"]
    assert reply.content["metrics"]["ala-fault"] == 0
