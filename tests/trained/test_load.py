"""The models of a run folder come back as they were, and score what the run says they do."""

import numpy as np
import pytest
import torch
from small import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trained.worlds import NAMES, PIXELS, RANDOM, Y, features, images, linear, run

import fedala
from fedala import UserError, load
from fedala.data import Dataset, federate, hold_out_clients
from fedala.runs.digests import Digests
from fedala.runs.folder import RunFolder
from fedala.simulation.metrics import list_details


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Run two methods with two seeds, once into a folder and once in memory."""
    folder = tmp_path_factory.mktemp("both") / "run"
    options = {"method": "fedala,fedavg", "seeds": 2, "set": {"fedala.max_epochs": 2}}
    run(folder, **options)
    return folder, run(None, **options)


def equal(module, saved):
    state = module.state_dict()
    return state.keys() == saved.keys() and all(torch.equal(state[n], saved[n]) for n in saved)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("best", [False, True])
def test_models_are_those_of_the_result_to_the_bit(both, seed, best):
    folder, result = both
    trained = load(folder, "fedala", seed, best)
    method = result.methods["fedala"]
    models = method.best_models if best else method.models
    for client in trained.clients:
        assert equal(trained.personal(client), models[seed, client])
    assert equal(trained.global_model(), models[seed, None])
    assert not trained.personal(1).training
    assert trained.methods == ("fedala", "fedavg")


def test_without_personal_models_every_client_has_the_global_one(both):
    folder, result = both
    trained = load(folder, "fedavg")
    assert trained.seed == 0
    assert not trained.has_personal_models
    assert equal(trained.personal(2), result.methods["fedavg"].models[0, None])


@pytest.mark.parametrize("method", ["fedala", "fedavg"])
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_of_clients_csv_to_the_last_digit(both, method, seed):
    folder, _ = both
    trained = load(folder, method, seed)
    federation = federate(images(), "iid", 3)
    scores = trained.evaluate(federation)
    rows = RunFolder.open(folder).rows("clients.csv")
    own = [row for row in rows if (row["method"], row["seed"]) == (method, seed)]
    assert len(own) == 3
    for row in own:
        found = scores[row["client"]]
        assert (found.score, found.samples) == (row["accuracy"], row["samples"])
        test = federation.test[row["client"]]
        alone = trained.evaluate((PIXELS[test], Y[test]), client=row["client"])
        assert alone.accuracy == row["accuracy"]
        if method == "fedala":  # the clients of FedAvg share the work on one model
            assert (found.loss, alone.loss) == (row["loss"], row["loss"])
        labels = trained.predict(PIXELS[test], row["client"])
        assert (labels == np.array(NAMES)[Y[test]]).mean() == row["accuracy"]


CASES = {
    "normalize": (None, None, {"normalize": "0.4/0.2", "model": "cnn"}),
    "float64": (None, None, {"precision": "float64"}),
    "bf16": (None, None, {"precision": "bf16"}),
    "labels": (features((torch.arange(80).view(-1, 1) % torch.tensor([2, 3])) % 2, 2), 2, {}),
    "numbers": (features(torch.arange(80) / 80, 1), 1, {}),
    "mae": (features(torch.arange(80).view(-1, 2) / 20, 2), 2, {"loss": "mae"}),
    "huber": (features(torch.arange(80) / 80, 1), 1, {"loss": "huber"}),
    "smoothed": (None, None, {"label_smoothing": 0.2, "class_weights": "balanced"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_metric_and_precision_is_measured_as_in_the_run(case, tmp_path):
    dataset, outputs, options = CASES[case]
    model = {"model": linear(outputs)} if outputs else {}
    run(tmp_path / "run", dataset, **{**model, **options})
    trained = load(tmp_path / "run", **model)
    scores = trained.evaluate(federate(dataset or images(), "iid", 3))
    for row in RunFolder.open(tmp_path / "run").rows("clients.csv"):
        found = scores[row["client"]]
        assert found.score == row[trained.metric.name]
        assert found.loss == row["loss"]


@pytest.mark.parametrize("case", ["normalize", "numbers", "mae", "labels"])
def test_single_predictions_are_measured_as_in_metrics_csv(case, tmp_path):
    dataset, outputs, options = CASES[case]
    model = {"model": linear(outputs)} if outputs else {}
    run(tmp_path / "run", dataset, **{**model, **options})
    trained = load(tmp_path / "run", **model)
    federation = federate(dataset or images(), "iid", 3)
    scores = trained.evaluate(federation)
    names = [one.name for one in list_details(trained.metric)]
    wanted = {
        "normalize": ["f1", "balanced_accuracy", "auc", "ece"],
        "numbers": ["mae", "rmse", "r2"],
        "mae": ["rmse", "r2"],
        "labels": [],
    }
    assert names == wanted[case]
    rows = RunFolder.open(tmp_path / "run").rows("metrics.csv")
    for name in names:
        found = np.mean([one.metrics[name] for one in scores.personal])
        assert found == pytest.approx(rows[-1][f"{name}_mean"], rel=1e-6)
    for one, rows in zip(scores.personal, federation.test, strict=True):
        share = np.bincount(Y[rows]).max() / len(rows) if case == "normalize" else None
        assert one.majority_share == share
        assert case != "labels" or one.metrics == {}


def test_a_loss_of_ones_own_is_given_again(tmp_path):
    def loss(output, y):
        return ((output - y) ** 4).mean()

    data = features(torch.arange(80).view(-1, 1) / 80, 1)
    run(tmp_path / "run", data, model=linear(1), loss=loss)
    trained = load(tmp_path / "run", model=linear(1))
    assert trained.predict(data.x, client=0).shape == (80,)
    with pytest.raises(UserError, match="loss of its own"):
        trained.evaluate(data)
    again = load(tmp_path / "run", model=linear(1), loss=loss)
    scores = again.evaluate(federate(data, "iid", 3))
    for row in RunFolder.open(tmp_path / "run").rows("clients.csv"):
        assert scores[row["client"]].score == row["own_loss"]


def test_all_kinds_of_data_give_the_same_scores(both, tmp_path):
    trained = load(both[0], "fedala")
    np.savez(tmp_path / "new.npz", x=PIXELS, y=Y)
    tensors = TensorDataset(torch.from_numpy(PIXELS), torch.from_numpy(Y))
    reordered = Dataset(
        "other", torch.from_numpy(PIXELS), torch.from_numpy((Y + 1) % 4), 4, ("dog", *NAMES[:3])
    )
    kinds = [
        tmp_path / "new.npz",
        str(tmp_path / "new.npz"),
        images(),
        reordered,
        (PIXELS, [NAMES[label] for label in Y]),
        (PIXELS.transpose(0, 2, 3, 1), Y),
        tensors,
        DataLoader(tensors, batch_size=7),
    ]
    found = [trained.evaluate(data) for data in kinds]
    assert len(found[0]) == 4
    assert all(scores == found[0] for scores in found)
    assert len({one.loss for one in found[0]}) > 1
    assert "client 0" in repr(found[0])
    with pytest.raises(AttributeError, match="several models"):
        _ = found[0].accuracy


def test_a_result_stands_for_its_run_folder(both, tmp_path):
    _, without = both
    result = run(tmp_path / "run", method="local,fedavg")
    for client in range(3):
        found = load(result, "local").personal(client)
        assert equal(found, load(tmp_path / "run", "local").personal(client).state_dict())
    sentence = r"no run folder, so its models are in result\.models alone: .*run\(out=…\)"
    with pytest.raises(UserError, match=sentence):
        load(without, "fedavg")
    with pytest.raises(UserError, match=sentence):
        fedala.onboard(without, (PIXELS[:4], Y[:4]))


def test_it_says_what_it_is_in_a_line(both):
    text = repr(load(both[0], "fedala", 1, best=True))
    assert "fedala, seed 1, best evaluation, cnn, 3 clients" in text
    assert len(text) < 300
    assert load(both[0], "fedala").config.rounds == 1


def test_own_models_are_given_again(tmp_path):
    data = Dataset(
        "own", torch.from_numpy(RANDOM.normal(size=(60, 1, 6, 6))).float(), torch.arange(60) % 3, 3
    )
    result = run(None, data, model=Net)
    run(tmp_path / "run", data, model=Net)
    trained = load(tmp_path / "run", model=Net)
    assert equal(trained.personal(1), result.models[0, 1])
    assert not trained.has_global_model
    with pytest.raises(UserError, match=r"no whole global model.*out\."):
        trained.global_model()
    with pytest.raises(UserError, match="model of its own"):
        load(tmp_path / "run")
    other = load(tmp_path / "run", model=lambda: Net(classes=5))
    with pytest.raises(UserError, match=r"out.bias has the shape \(5,\), and the saved one \(3,\)"):
        other.personal(0)
    with pytest.raises(UserError, match="not those of the model that was given: it also has bias"):
        load(tmp_path / "run", model=lambda: nn.Linear(3, 3)).personal(0)


def test_transient_buffers_and_tied_weights_of_an_own_model(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.out = nn.Linear(5, 4)
            self.register_buffer("shift", torch.full((5,), 0.5), persistent=False)

        def forward(self, x):
            return self.out(self.second(self.first(x).relu() + self.shift).relu())

    data = features(torch.from_numpy(Y), 4)
    run(tmp_path / "run", data, model=Tied)
    trained = load(tmp_path / "run", model=Tied)
    model = trained.personal(0)
    assert model.first.weight is model.second.weight
    assert torch.equal(model.shift, torch.full((5,), 0.5))
    scores = trained.evaluate(federate(data, "iid", 3))
    for row in RunFolder.open(tmp_path / "run").rows("clients.csv"):
        assert scores[row["client"]].loss == row["loss"]


def test_clients_have_the_names_of_the_data(tmp_path):
    data, owners = images(), torch.from_numpy(Y // 2)
    names = ("north", "south")
    named = Dataset("n", data.x, data.y, 4, NAMES, clients=owners, client_names=names)
    run(tmp_path / "run", named, partition=None, clients=None)
    trained = load(tmp_path / "run")
    assert trained.clients == names
    assert equal(trained.personal("south"), trained.personal(1).state_dict())
    assert [one.client for one in trained.evaluate(named)] == ["north", "south"]
    with pytest.raises(UserError, match="no client 'sout'"):
        trained.personal("sout")
    (tmp_path / "run" / "digests.json").unlink()
    (tmp_path / "run" / "clients.json").write_text('["north"]')
    with pytest.raises(UserError, match="1 names for 2 clients"):
        load(tmp_path / "run")
    run(tmp_path / "iid", named, clients=2)  # its clients are not those of the data
    assert load(tmp_path / "iid").clients == (0, 1)


@pytest.mark.parametrize("names", [("1", "2", "10"), ("1", "2", "ward")])
def test_a_number_is_a_name_if_clients_are_called_by_numbers(names, tmp_path):
    """The hospital called 2 has the number 1: Python and the command line mean the same one."""
    data, owners = images(), torch.from_numpy(Y % 3)
    named = Dataset("n", data.x, data.y, 4, NAMES, clients=owners, client_names=names)
    run(tmp_path / "run", named, partition=None, clients=None, method="local")
    trained = load(tmp_path / "run")
    weights = [trained.personal(name).state_dict() for name in names]
    assert not equal(trained.personal("1"), weights[1])
    for client in (2, "2", np.int64(2)):
        assert trained.find_client(client) == 1
        assert equal(trained.personal(client), weights[1])
    scores = trained.evaluate(named)
    assert scores[2] == scores["2"] == scores.personal[1]
    assert trained.evaluate(named, client=2)[2] == scores[2]
    assert np.array_equal(trained.predict(PIXELS, 2), trained.predict(PIXELS, "2"))
    for client in (0, "0"):
        with pytest.raises(UserError, match=f"client 0; .* called 1, 2, {names[2]}"):
            trained.predict(PIXELS, client)
        with pytest.raises(KeyError, match="no score of '0'"):
            scores[client]
    with pytest.raises(UserError, match="no client 3"):
        trained.export(tmp_path / "model.safetensors", 3)


def test_an_older_folder_needs_its_data(both, tmp_path):
    run(tmp_path / "run")
    wanted = load(tmp_path / "run").predict(PIXELS, 0, probabilities=True)
    (tmp_path / "run" / "preprocessing.json").unlink()
    with pytest.raises(UserError, match="dataset=…"):
        load(tmp_path / "run")
    for data in (images(), federate(images(), "iid", 3)):
        trained = load(tmp_path / "run", dataset=data)
        assert np.array_equal(trained.predict(PIXELS, 0, probabilities=True), wanted)
    with pytest.raises(UserError, match="leave out dataset"):
        load(both[0], "fedala", dataset=images())


def test_damage_is_noticed(tmp_path):
    run(tmp_path / "run", method="fedavg")
    path = tmp_path / "run" / "models" / "fedavg" / "seed-0" / "global.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="damaged"):
        load(tmp_path / "run").global_model()
    (tmp_path / "run" / "preprocessing.json").write_text("{}")
    with pytest.raises(UserError, match=r"preprocessing\.json is damaged"):
        load(tmp_path / "run")


def test_refusals(both, tmp_path):
    folder, _ = both
    with pytest.raises(UserError, match="several methods: name one of fedala, fedavg"):
        load(folder)
    with pytest.raises(UserError, match=r"no method 'ditto'.*the methods are fedala, fedavg"):
        load(folder, "ditto")
    with pytest.raises(UserError, match="seed 7; the seeds are 0, 1"):
        load(folder, "fedala", 7)
    with pytest.raises(UserError, match="not a run folder"):
        load(tmp_path)
    with pytest.raises(UserError, match="leave out model"):
        load(folder, "fedala", model=Net)
    trained = load(folder, "fedala")
    for client, sentence in ((3, "0 to 2"), (-1, "0 to 2"), ("x", "no client"), (True, "not bool")):
        with pytest.raises(UserError, match=sentence):
            trained.personal(client)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((PIXELS[:, :, :8], Y), "N×1×16×16"),
        ((PIXELS, Y[:5]), "60 samples and 5 targets"),
        ((PIXELS, Y + 1), "class number 4, which the run does not have"),
        ((PIXELS, Y / 2), "one class for each sample"),
        (
            (PIXELS, ["emu"] * 60),
            "class emu, which the run does not have; its classes are ant, bee, cat, dog",
        ),
        ((PIXELS[:0], Y[:0]), "empty"),
        (5, "must be a path"),
        (federate(images(), "iid", 4), "4 clients, and the run 3"),
        ("nowhere/nothing.npz", "nothing"),
    ],
)
def test_other_data_is_refused(both, data, sentence):
    with pytest.raises(UserError, match=sentence):
        load(both[0], "fedala").evaluate(data)


def test_a_run_without_models_says_why(tmp_path):
    run(tmp_path / "off", save_models=False, save_best=False, method="fedavg")
    with pytest.raises(UserError, match="save_models was off"):
        load(tmp_path / "off")
    run(tmp_path / "last", save_best=False, method="fedavg")
    with pytest.raises(UserError, match="not of the best one"):
        load(tmp_path / "last", best=True)
    digests = Digests.read(tmp_path / "last")
    digests.methods["fedavg"].models = {}  # as it is while the method runs
    (tmp_path / "last" / "digests.json").write_bytes(digests.pack())
    with pytest.raises(UserError, match=r"no models yet.*fedala\.run\(resume="):
        load(tmp_path / "last")


def test_a_point_of_a_sweep_is_a_method(tmp_path):
    run(tmp_path / "run", method="fedavg", lr=None, sweep={"lr": "0.1,0.01"})
    with pytest.raises(UserError, match=r"fedavg\[lr=0.1\], fedavg\[lr=0.01\]"):
        load(tmp_path / "run")
    assert load(tmp_path / "run", "fedavg[lr=0.01]").method == "fedavg[lr=0.01]"


def test_names_are_loaded_when_they_are_used():
    assert fedala.load is load
    assert fedala.TrainedFederation.__name__ == "TrainedFederation"
    assert "load" in dir(fedala)


@pytest.mark.parametrize("names", [("d", "c", "b", "a"), ()])
def test_held_out_clients_have_no_models_and_the_others_keep_their_own(names, tmp_path):
    data = images()
    owners = torch.arange(60) % 4 if names else None
    named = Dataset("n", data.x, data.y, 4, NAMES, clients=owners, client_names=names)
    federation = federate(named, None if names else "iid", 4)
    run(
        tmp_path / "run", named, partition=None if names else "iid", clients=4, method="local",
        holdout_clients="1", holdout_epochs="0",
    )  # fmt: skip
    trained, folder = load(tmp_path / "run"), RunFolder.open(tmp_path / "run")
    order = hold_out_clients(federation, "1").original
    assert order[-1] != 3  # or the clients would not change their places
    assert trained.clients == (tuple(names[i] for i in order[:3]) if names else (0, 1, 2))
    scores = trained.evaluate(federation)
    for row in folder.rows("clients.csv"):
        assert scores[trained.clients[row["client"]]].loss == row["loss"]
    assert len(scores.personal) == len(trained.evaluate(named).personal) == 3
    with pytest.raises(UserError, match=r"held out.*onboard"):
        trained.personal(names[order[-1]] if names else 3)


def test_classes_that_are_called_by_numbers_are_no_positions(tmp_path):
    """A class called 1 is not the one with the number 1."""
    data = features(torch.arange(40) % 3, 3, ("1", "2", "3"))
    run(tmp_path / "run", data, model="mlp", method="fedavg")
    trained, some = load(tmp_path / "run"), (data.y < 2).numpy()
    x, called = data.x.numpy()[some], (data.y.numpy() + 1)[some]
    wanted = trained.evaluate((x, called.astype(str)))
    np.savez(tmp_path / "new.npz", x=x, y=called)
    assert trained.evaluate((x, called)) == trained.evaluate(tmp_path / "new.npz") == wanted
    numbers = Dataset("unnamed", torch.from_numpy(x), torch.from_numpy(called - 1), 3)
    assert trained.evaluate(numbers) == wanted
    one = fedala.onboard(tmp_path / "run", tmp_path / "new.npz", epochs="0").clients[0]
    named = Dataset("n", torch.from_numpy(x), numbers.y, 3, ("1", "2", "3"))
    assert one.losses == fedala.onboard(tmp_path / "run", named, epochs="0").clients[0].losses
    with pytest.raises(UserError, match="holds the class 0, which the run does not have"):
        trained.evaluate((x, called - 1))
