"""Flower's privacy mods around this package's client app: bounds hold, and noise arrives."""

import numpy as np
import pytest
import torch
from torch import nn

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from dataclasses import replace  # noqa: E402

from flower.controlled import Controlled  # noqa: E402
from flower.inprocess import CUSTOM, RUN, InProcessGrid  # noqa: E402
from flower.test_mod import (  # noqa: E402
    example,  # noqa: F401
    make_context,
    make_message,
    make_moving_app,
    measure_distance,
)
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.client import mod as legacy  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import (  # noqa: E402
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    message_size_mod,
)
from small import Net  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.errors import RunError  # noqa: E402
from fedala.flower import ala_mod, client_app, order_mods  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.methods import catalogue, register, registry  # noqa: E402

HUGE = 1e6
NO_NOISE = {"sensitivity": 0.0, "epsilon": 1.0, "delta": 1e-5}


@pytest.fixture(autouse=True)
def _do_not_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr("fedala.io.files.flush", lambda descriptor: None)
    monkeypatch.setattr("fedala.io.files.flush_folder", lambda folder: None)


class ScaledNet(Net):
    """The small model, with a parameter that has no dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * super().forward(x)


#: The app of each method: ALA does not support parameters without dimensions.
APPS = {"fedala": CUSTOM, "fedavg": replace(CUSTOM, model=ScaledNet)}


def federate(tmp_path, mods=(), clients=2, method="fedala", **options):
    """Run a federation; return its grid and its result."""
    custom = APPS.get(method, CUSTOM)
    run_config = {"clients": clients, "out": str(tmp_path / "runs"), **RUN, "rounds": 2, **options}
    run_config["method"] = method
    grid = InProcessGrid(client_app(custom, list(mods)), clients, tmp_path / "state", run_config)
    return grid, serve(grid, run_config, custom)


def read_uploads(grid):
    """Return (sent, upload), as arrays by name, for each train message."""
    pairs = []
    for sent, reply in zip(grid.sent, grid.replies, strict=True):
        if sent.metadata.message_type == "train":
            records = (sent.content["arrays"], reply.content["arrays"])
            pairs.append([{n: a.numpy() for n, a in record.items()} for record in records])
    return pairs


def subtract(sent, upload):
    """Return the update: the real numbers of the model, by name."""
    return {name: upload[name] - sent[name] for name in sent if sent[name].dtype.kind == "f"}


def measure(update):
    return np.sqrt(sum(np.sum(move.astype(np.float64) ** 2) for move in update.values()))


def list_figures(result):
    return [(row.accuracy, row.loss) for row in result.history]


@pytest.fixture(scope="module")
def run_plain(tmp_path_factory):
    """Return a function that runs the same federation without a mod, once for each method."""
    runs = {}

    def run(method):
        if method not in runs:
            runs[method] = federate(tmp_path_factory.mktemp(method), method=method)
        return runs[method]

    return run


@pytest.mark.parametrize(
    ("method", "make_mods", "clipping_norm"),
    [
        ("fedala", lambda bound: [fixedclipping_mod], None),
        ("fedavg", lambda bound: [fixedclipping_mod, LocalDpMod(bound, **NO_NOISE)], HUGE),
        ("fedala", lambda bound: [LocalDpMod(bound, **NO_NOISE), message_size_mod], 0.0),
    ],
    ids=["fixedclipping_mod", "both", "LocalDpMod"],
)
def test_updates_are_clipped_to_the_bound(method, make_mods, clipping_norm, run_plain, tmp_path):
    """In round 1, an upload is sent + u · min(1, bound / ‖u‖), for the update u without a mod.

    Whole numbers are no part of an update: they arrive as they are.
    """
    grid, result = run_plain(method)
    before, history = read_uploads(grid)[:2], result.history
    norms = [measure(subtract(*pair)) for pair in before]
    bound = float(np.mean(norms))  # one update is longer than this, the other one shorter
    norm = bound if clipping_norm is None else clipping_norm
    grid, result = federate(tmp_path, make_mods(bound), method=method, clipping_norm=norm)
    uploads = read_uploads(grid)
    assert len(uploads) == 4  # of every round, and all of them counted
    assert [row.uploaded for row in result.history] == [row.uploaded for row in history]
    for (sent, plain), (_, upload), norm in zip(before, uploads, norms, strict=False):
        factor = min(1.0, bound / norm)
        for name, value in upload.items():
            wanted = plain[name]
            if wanted.dtype.kind == "f":
                wanted = sent[name] + factor * (wanted - sent[name])
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-6, err_msg=name)
    assert sorted(norm > bound for norm in norms) == [False, True]
    assert max(measure(subtract(*pair)) for pair in uploads) <= bound * (1 + 1e-5)
    for sent, upload in uploads:
        assert upload["norm.num_batches_tracked"] > sent["norm.num_batches_tracked"]


@pytest.mark.parametrize("name", ["fixedclipping_mod", "LocalDpMod"])
def test_a_bound_that_no_update_reaches_changes_nothing(name, run_plain, tmp_path):
    """`sent + (upload − sent)` differs from the upload by rounding alone."""
    mods = {"fixedclipping_mod": fixedclipping_mod, "LocalDpMod": LocalDpMod(HUGE, **NO_NOISE)}
    options = {"clipping_norm": HUGE} if name == "fixedclipping_mod" else {}
    plain_grid, plain = run_plain("fedala")
    grid, result = federate(tmp_path, [mods[name]], **options)
    np.testing.assert_allclose(list_figures(result), list_figures(plain), rtol=1e-4)
    for (_, upload), (_, wanted) in zip(read_uploads(grid), read_uploads(plain_grid), strict=True):
        assert list(upload) == list(wanted)
        for key, value in upload.items():
            assert value.dtype == wanted[key].dtype
            np.testing.assert_allclose(value, wanted[key], rtol=0, atol=1e-5, err_msg=key)


def test_noise_has_the_scale_of_its_formula(run_plain, tmp_path):
    """The deviation is sensitivity · √(2 ln(1.25 / delta)) / epsilon, on every real number."""
    sensitivity, epsilon, delta = 0.01, 0.5, 1e-5
    mod = LocalDpMod(HUGE, sensitivity, epsilon, delta)
    np.random.seed(3)
    grid, _ = federate(tmp_path, [mod], method="fedavg", rounds=1)
    plain = [upload for _, upload in read_uploads(run_plain("fedavg")[0])[:2]]
    noisy = [upload for _, upload in read_uploads(grid)]
    noise = [subtract(*pair) for pair in zip(plain, noisy, strict=True)]
    flat = np.concatenate([value.ravel() for one in noise for value in one.values()])
    scale = sensitivity * np.sqrt(2 * np.log(1.25 / delta)) / epsilon
    assert len(flat) > 250
    assert flat.std() == pytest.approx(scale, rel=0.15)
    assert abs(flat.mean()) < 4 * scale / np.sqrt(len(flat))
    assert all(np.abs(one["scale"]) > 1e-6 for one in noise)


def test_a_client_that_diverges_still_says_so(tmp_path, caplog):
    """Its reply has no arrays, so it passes the mod by."""
    caplog.set_level("WARNING", "flwr")
    mods = [LocalDpMod(1.0, **NO_NOISE)]
    _, result = federate(tmp_path, mods, clients=3, rounds=1, lr=1e9)
    assert [row.diverged for row in result.history] == [1, 0]
    assert "client 2 (seed 5, lane 0) diverged in round 1" in caplog.text
    assert "failed" not in caplog.text


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (legacy.secaggplus_mod, "secaggplus_mod .* needs Flower's SecAggPlusWorkflow"),
        (legacy.secagg_mod, "secagg_mod .* needs Flower's SecAggPlusWorkflow"),
        (adaptiveclipping_mod, "use fixedclipping_mod and the option clipping_norm"),
        (legacy.adaptiveclipping_mod, "import it from flwr.clientapp.mod"),
        (legacy.fixedclipping_mod, "import it from flwr.clientapp.mod"),
        (legacy.LocalDpMod(1.0, **NO_NOISE), "LocalDpMod .* import it from flwr.clientapp.mod"),
    ],
    ids=["secagg+", "secagg", "adaptive", "legacy adaptive", "legacy fixed", "legacy local"],
)
def test_mods_that_cannot_work_are_refused_when_the_app_is_loaded(mod, message):
    with pytest.raises(UserError, match=message):
        client_app(CUSTOM, mods=[message_size_mod, mod])


NO_CLIPPING_MOD = "clipping_norm is set, but the app does not have the mod that clips"


@pytest.fixture
def controlled():
    """Register a method with extra tensors, and forget it afterwards."""
    register(Controlled)
    yield
    del registry._classes()["controlled"]
    catalogue.cache_clear()


@pytest.mark.parametrize(
    ("mods", "options", "message"),
    [
        ([fixedclipping_mod], {}, "fixedclipping_mod needs a bound: set clipping_norm"),
        (
            [],
            {"clipping_norm": 1.0},
            NO_CLIPPING_MOD,
        ),
        (
            [LocalDpMod(1.0, **NO_NOISE)],
            {"clipping_norm": 1.0},
            NO_CLIPPING_MOD,
        ),
        ([LocalDpMod(1.0, **NO_NOISE)], {"method": "fedfomo"}, "FedFomo sends several models"),
        (
            [LocalDpMod(1.0, **NO_NOISE)],
            {"method": "controlled"},
            "Controlled uploads tensors besides the model",
        ),
    ],
    ids=["no bound", "no mod", "another mod", "a stack of models", "extra tensors"],
)
def test_mods_that_do_not_fit_the_run_are_refused_by_name(
    mods, options, message, controlled, tmp_path, caplog
):
    """Every node tells the server why, and the server repeats it when it gives up."""
    caplog.set_level("WARNING", "flwr")
    with pytest.raises(UserError, match=f"every connected node; the commonest reason .*{message}"):
        federate(tmp_path, mods, start_timeout=1e-9, **options)
    for node in (100, 101):
        assert f"Node {node} is refused: {message}" in caplog.text
    assert "Waiting for clients: 0 online, at least 2 required. Refused: every" not in caplog.text


@pytest.mark.parametrize("method", ["fedfomo", "controlled"])
def test_a_server_refuses_a_bound_that_does_not_apply(method, controlled, tmp_path):
    with pytest.raises(UserError, match="clipping_norm does not apply"):
        federate(tmp_path, [fixedclipping_mod], method=method, clipping_norm=1.0)


def hide(mod):
    """Return a mod that cannot be recognised."""
    return lambda message, context, call_next: mod(message, context, call_next)


def test_secure_aggregation_that_is_not_recognised_ends_the_run_as_failed(tmp_path):
    with pytest.raises(RunError, match=r"No update has counted in 2 rounds.*KeyError"):
        federate(tmp_path, [hide(legacy.secaggplus_mod)])


def test_order_mods_lets_local_dp_bound_the_upload_of_another_app(example, tmp_path):  # noqa: F811
    """There, the mod measures from the model that the server sent, not from ALA's."""
    ala, clipping = ala_mod(example.setup, layers=1), LocalDpMod(0.1, **NO_NOISE)
    app = make_moving_app(example, *order_mods(ala, clipping))
    InProcessGrid(app, 0, tmp_path)
    for round in range(2):
        torch.manual_seed(round)
        sent = ArrayRecord(example.make_model().state_dict())
        reply = app(make_message(sent), make_context(tmp_path))
        assert measure_distance(reply.content["arrays"], sent) == pytest.approx(0.1, rel=1e-4)


def test_order_mods_keeps_privacy_mods_out_of_evaluations(example, tmp_path):  # noqa: F811
    """The reply to an evaluation has metrics and no arrays, and Flower's mods fail on it."""
    sent = ArrayRecord(example.make_model().state_dict())
    for mods, is_answered in (([LocalDpMod(0.1, **NO_NOISE)], False), (None, True)):
        ala = ala_mod(example.setup, layers=1)
        app = ClientApp(mods=mods or order_mods(ala, LocalDpMod(0.1, **NO_NOISE)))
        metrics = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
        app.evaluate()(lambda message, context: Message(metrics, reply_to=message))  # noqa: B023
        reply = app(make_message(sent, "evaluate"), make_context(tmp_path))
        assert (reply.has_content() and "metrics" in reply.content) == is_answered
