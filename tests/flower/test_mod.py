"""ALA in any Flower app: the models that it initialises, stores and uploads."""

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

from flower.inprocess import InProcessGrid  # noqa: E402
from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402
from flwr.common import (  # noqa: E402
    EvaluateIns,
    FitIns,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common import recorddict_compat as compat  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402

from fedala import ALA, UserError  # noqa: E402
from fedala.flower import ala_mod, order_mods  # noqa: E402
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
    """Run Flower's own FedAvg over two clients; return the grid and the result."""
    grid = InProcessGrid(app, 2, tmp_path)
    torch.manual_seed(0)
    start = ArrayRecord(example.make_model().state_dict())
    strategy = strategy or FedAvg(fraction_evaluate=0.0)
    return grid, strategy.start(grid, start, num_rounds=rounds)


def test_the_example_is_better_after_than_before(example, tmp_path):
    _, before = federate(example, example.before, tmp_path / "before")
    _, after = federate(example, example.after, tmp_path / "after")
    accuracies = [result.train_metrics_clientapp[4]["accuracy"] for result in (before, after)]
    assert accuracies[1] > accuracies[0] + 0.2


def test_a_client_uploads_the_same_as_in_a_loop_of_its_own(example, tmp_path):
    """Repeat the rounds by hand, with `fedala.ALA`."""
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
    InProcessGrid(ClientApp(), 0, tmp_path)


def make_message(arrays, kind="train", **config):
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    return Message(content, dst_node_id=7, message_type=kind)


def make_context(tmp_path, **node_config):
    return Context(
        1, 7, {"partition-id": 0, "state-dir": str(tmp_path), **node_config}, RecordDict(), {}
    )


def make_moving_app(example, *around):
    """Make an app whose training adds 0.5 to every parameter."""
    app = ClientApp(mods=list(around))

    def train(message, context):
        seen = message.content["arrays"].to_torch_state_dict()
        moved = ArrayRecord({name: value + 0.5 for name, value in seen.items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    app.train()(train)
    app.evaluate()(lambda message, context: Message(message.content, reply_to=message))
    return app


def measure_distance(a, b):
    return np.sqrt(
        sum(
            np.sum((x - y) ** 2)
            for x, y in zip(a.to_numpy_ndarrays(), b.to_numpy_ndarrays(), strict=True)
        )
    )


def measure_clipped_updates(example, tmp_path, order):
    """Return the norms of three rounds' updates, as the server sees them, clipped to 0.1."""
    app, norms = make_moving_app(example, *order), []
    for round in range(3):
        torch.manual_seed(round)
        sent = ArrayRecord(example.make_model().state_dict())
        reply = app(make_message(sent, clipping_norm=0.1), make_context(tmp_path))
        norms.append(measure_distance(reply.content["arrays"], sent))
    return norms


def test_a_clipping_mod_still_bounds_the_upload(example, tmp_path):
    ala = ala_mod(example.setup, layers=1)
    order = order_mods(ala, fixedclipping_mod)
    assert order[1:] == [ala]
    assert max(measure_clipped_updates(example, tmp_path / "right", order)) <= 0.1 * (1 + 1e-5)
    # This is why the order matters.
    assert max(measure_clipped_updates(example, tmp_path / "wrong", [ala, fixedclipping_mod])) > 0.2


def test_two_ala_mods_are_refused(example):
    with pytest.raises(UserError, match="one ALA mod"):
        order_mods(ala_mod(example.setup), ala_mod(example.setup))


def test_wrong_settings_are_refused_before_any_message(example):
    with pytest.raises(UserError, match="eta"):
        ala_mod(example.setup, eta=-1)


def test_only_train_messages_are_touched(example, tmp_path):
    app = make_moving_app(example, ala_mod(example.setup))
    sent = ArrayRecord(example.make_model().state_dict())
    app(make_message(sent), make_context(tmp_path))
    other = ArrayRecord(example.make_model().state_dict())
    reply = app(make_message(other, "evaluate"), make_context(tmp_path))
    assert measure_distance(reply.content["arrays"], other) == 0


def test_the_lower_layers_are_the_received_ones_and_the_message_does_not_change(example, tmp_path):
    seen = []

    def spy(message, context, call_next):
        seen.append(message.content["arrays"])
        return call_next(message, context)

    app = ClientApp(mods=[ala_mod(example.setup), spy])
    app.train()(example.train)
    for seed in range(2):
        torch.manual_seed(seed)
        message = make_message(ArrayRecord(example.make_model().state_dict()))
        sent = message.content["arrays"]
        app(message, make_context(tmp_path))
        assert message.content["arrays"] is sent
    received, initialized = sent.to_torch_state_dict(), seen[1].to_torch_state_dict()
    assert all(torch.equal(initialized[name], received[name]) for name in ("0.weight", "0.bias"))
    assert not torch.equal(initialized["2.weight"], received["2.weight"])


def test_the_state_is_private_and_survives_a_new_process(example, tmp_path):
    """A second app continues from the first one's files, which only their owner can read."""
    os.umask(0o022)
    sent = []
    for seed in range(2):
        torch.manual_seed(seed)
        sent.append(ArrayRecord(example.make_model().state_dict()))

    def run_rounds(*apps_and_folders):
        for arrays, (app, folder) in zip(sent, apps_and_folders, strict=True):
            reply = app(make_message(arrays), make_context(folder))
        return reply.content["arrays"]

    one, two = (make_moving_app(example, ala_mod(example.setup)) for _ in range(2))
    one_app = run_rounds((one, tmp_path / "a"), (one, tmp_path / "a"))
    two_apps = run_rounds((one, tmp_path / "b"), (two, tmp_path / "b"))
    forgotten = run_rounds((one, tmp_path / "c"), (two, tmp_path / "d"))
    assert measure_distance(one_app, two_apps) == 0
    assert measure_distance(one_app, forgotten) > 0.1
    [file] = (tmp_path / "a").rglob("*.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {
        stat.S_IMODE(folder.stat().st_mode) for folder in [file.parent, *file.parents[1:3]]
    } == {0o700}


def test_averaged_counters_may_be_fractions(tmp_path):
    def setup(context):
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4)), (
            torch.randn(20, 2),
            torch.randint(0, 4, (20,)),
        )

    app = make_moving_app(None, ala_mod(setup))
    for _ in range(2):
        arrays = ArrayRecord(setup(None)[0].state_dict())
        arrays["0.num_batches_tracked"] = Array(np.array(2.5))
        reply = app(make_message(arrays), make_context(tmp_path))
        assert reply.content["arrays"]["0.num_batches_tracked"].numpy() == 3.0


def test_another_model_than_the_servers_is_refused(example, tmp_path):
    app = make_moving_app(
        example, ala_mod(lambda context: (nn.Linear(2, 4), example.load_data(context)))
    )
    with pytest.raises(UserError, match=r"does not have 0\.weight"):
        app(make_message(ArrayRecord(example.make_model().state_dict())), make_context(tmp_path))


def test_arrays_without_names_are_matched_by_index(example, tmp_path):
    app = make_moving_app(example, ala_mod(example.setup))
    uploads = []
    for folder, make in (
        ("names", lambda m: m.state_dict()),
        ("indices", lambda m: [*map(np.asarray, m.parameters())]),
    ):
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.no_grad():
                arrays = ArrayRecord(make(example.make_model().requires_grad_(False)))
            reply = app(make_message(arrays), make_context(tmp_path / folder))
        uploads.append(reply.content["arrays"])
    assert measure_distance(*uploads) == 0


# --- the legacy API ---


def make_legacy_app(example, *around, edit=lambda arrays, round: arrays):
    """Make an app with a `NumPyClient` behind a `client_fn`, as in Flower's older examples."""

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
            trained = edit(content["arrays"].to_numpy_ndarrays(), config["round"])
            return (
                trained,
                200,
                {"accuracy": content["metrics"]["accuracy"], "note": "text is allowed here"},
            )

        def evaluate(self, parameters, config):
            return 0.5, 200, {"sum": float(sum(p.sum() for p in parameters))}

    return ClientApp(client_fn=lambda context: Client(context).to_client(), mods=list(around))


def fit(app, arrays, round, folder):
    """Call `fit` as a legacy server does: by messages whose arrays declare no type and shape."""
    ins = FitIns(ndarrays_to_parameters(arrays), {"round": round, "rate": 0.1, "name": "x"})
    message = Message(
        compat.fitins_to_recorddict(ins, keep_input=True), dst_node_id=7, message_type="train"
    )
    assert {array.dtype for array in message.content["fitins.parameters"].values()} == {""}
    reply = app(message, make_context(folder))
    return compat.recorddict_to_fitres(reply.content, keep_input=True)


def test_a_legacy_client_equals_an_app_of_today(example, tmp_path):
    old, new = make_legacy_app(example, ala_mod(example.setup, layers=1)), example.after
    for round in range(3):
        torch.manual_seed(round)
        model = example.make_model()
        result = fit(
            old, [value.numpy() for value in model.state_dict().values()], round, tmp_path / "old"
        )
        reply = new(make_message(ArrayRecord(model.state_dict())), make_context(tmp_path / "new"))
        expected = reply.content["arrays"].to_numpy_ndarrays()
        for array, value in zip(parameters_to_ndarrays(result.parameters), expected, strict=True):
            assert array.dtype == value.dtype
            np.testing.assert_array_equal(array, value)
        assert result.num_examples == 200
        assert result.metrics["accuracy"] == reply.content["metrics"]["accuracy"]
        assert (result.metrics["note"], result.metrics["ala-fault"]) == ("text is allowed here", 0)
    # Without ALA, training starts from another model.
    plain = fit(
        make_legacy_app(example),
        [value.numpy() for value in model.state_dict().values()],
        2,
        tmp_path,
    )
    assert not np.array_equal(parameters_to_ndarrays(plain.parameters)[2], expected[2])
    assert "ala-fault" not in plain.metrics


def test_other_legacy_messages_are_not_touched(example, tmp_path):
    app = make_legacy_app(example, ala_mod(example.setup))
    ins = EvaluateIns(ndarrays_to_parameters([np.ones(3)]), {})
    message = Message(
        compat.evaluateins_to_recorddict(ins, True), dst_node_id=7, message_type="evaluate"
    )
    assert compat.recorddict_to_evaluateres(
        app(message, make_context(tmp_path)).content
    ).metrics == {"sum": 3.0}


def test_a_legacy_client_that_returns_no_model_keeps_its_last_one(example, tmp_path):
    app = make_legacy_app(
        example, ala_mod(example.setup), edit=lambda arrays, round: [] if round == 1 else arrays
    )
    arrays = [value.numpy() for value in example.make_model().state_dict().values()]
    results = [fit(app, arrays, round, tmp_path) for round in range(3)]
    assert [result.metrics["ala-fault"] for result in results] == [0, 1, 0]
    assert [len(result.parameters.tensors) for result in results] == [4, 0, 4]


@pytest.mark.parametrize("arrays", [[], [np.array(["text"])] * 4])
def test_a_legacy_message_without_a_model_is_refused(example, tmp_path, arrays):
    with pytest.raises(UserError, match=r"no arrays|cannot be read"):
        fit(make_legacy_app(example, ala_mod(example.setup)), arrays, 0, tmp_path)


# --- numbers that are not finite ---


def run_rounds_with_fault(example, folder, poison, caplog, rounds=4, bad_round=1):
    """Run rounds with one fault; return the replies, and the client's state after each."""
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
    replies, states = [], []
    for round in range(rounds):
        torch.manual_seed(round)
        arrays = ArrayRecord(example.make_model().state_dict())
        bad["now"] = round == bad_round
        if bad["now"] and poison == "received":
            arrays["0.bias"] = Array(arrays["0.bias"].numpy() * np.inf)
        caplog.clear()
        replies.append(app(make_message(arrays), make_context(folder)).content)
        warned = any(
            record.levelname == "WARNING" and "not finite" in record.message
            for record in caplog.records
        )
        assert warned == bad["now"]
        [file] = folder.rglob("*.safetensors")
        states.append(load(file)[0])
    return replies, states


@pytest.mark.parametrize("poison", ["data", "received", "training"])
def test_a_bad_round_does_not_spoil_later_ones(example, tmp_path, caplog, monkeypatch, poison):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)  # caplog needs it
    replies, states = run_rounds_with_fault(example, tmp_path, poison, caplog)
    assert [reply["metrics"]["ala-fault"] for reply in replies] == [0, 1, 0, 0]
    for state in states:
        assert all(value.isfinite().all() for part in state.values() for value in part.values())
    for name in ("weights.2.weight", "weights.2.bias"):
        assert torch.equal(states[1]["ala"][name], states[0]["ala"][name])
        assert not torch.equal(states[3]["ala"][name], states[0]["ala"][name])
    same = all(
        torch.equal(states[1]["local"][name], value) for name, value in states[0]["local"].items()
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
        make_moving_app(example, ala_mod(example.setup))(
            make_message(arrays), make_context(tmp_path)
        )


def test_stored_weights_that_are_not_finite_are_learned_from_the_start(example, tmp_path):
    """The states of an older version may hold such weights."""
    app = make_moving_app(example, ala_mod(example.setup))
    for seed in range(2):
        torch.manual_seed(seed)
        reply = app(
            make_message(ArrayRecord(example.make_model().state_dict())), make_context(tmp_path)
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


def test_a_model_that_flattens_with_view_works(tmp_path):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(36, 4)

        def forward(self, x):
            return self.fc(self.conv(x).relu().view(-1, 36))

    data = torch.randn(20, 1, 5, 5), torch.randint(0, 4, (20,))
    app = make_moving_app(None, ala_mod(lambda context: (Views(), data)))
    for _ in range(2):
        reply = app(make_message(ArrayRecord(Views().state_dict())), make_context(tmp_path))
    [file] = tmp_path.rglob("*.safetensors")
    assert load(file)[0]["ala"]["trained"]
    assert reply.content["metrics"]["ala-fault"] == 0
