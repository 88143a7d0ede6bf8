"""Onboarding: a newcomer of a finished run is a held-out client of it, or one that joins late."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small import Net, assert_close
from typer.testing import CliRunner

import fedala
from fedala.cli.app import app
from fedala.data import Dataset, Federation, hold_out_clients
from fedala.errors import UserError
from fedala.lanes import Message
from fedala.methods import catalogue, registry
from fedala.runs.build import build_simulation
from fedala.runs.config import Config
from fedala.runs.plan import plan

SIZES = [9, 7, 8, 5, 6]
OPTIONS = {"model": Net, "batch_size": 4, "lr": 0.1, "precision": "float64", "device": "cpu"}


def make_federation(sizes=SIZES, *, split=False) -> Federation:
    """Learnable 6×6 samples of three classes, with three test samples for each client."""
    random = np.random.default_rng(0)
    total = sum(sizes) + 3 * len(sizes)
    y = torch.from_numpy(random.integers(0, 3, total))
    x = torch.from_numpy(random.normal(size=(total, 1, 6, 6))) + y.view(-1, 1, 1, 1) * 0.5
    cuts = np.cumsum([0, *(size + 3 for size in sizes)])
    rows = [np.arange(a, b) for a, b in itertools.pairwise(cuts)]
    nothing = (np.arange(0),) * len(sizes)
    data = Dataset("own", x.float(), y, 3)
    return Federation(
        data, tuple(own[:-3] for own in rows), tuple(own[-3:] for own in rows), nothing
    )


def select(federation, clients) -> Federation:
    parts = {
        part: tuple(getattr(federation, part)[client] for client in clients)
        for part in ("train", "test", "validation")
    }
    return Federation(federation.dataset, **parts)


def figures(found):
    """Return (client, epochs, score, loss) of what was onboarded."""
    return [
        (client.number, count, client.scores[count], client.losses[count])
        for count in found.clients[0].scores
        for client in found.clients
    ]


def recorded(result, name):
    return [
        (line["client"], line["epochs"], line["accuracy"], line["loss"])
        for line in result.methods[name].newcomer_clients
    ]


@pytest.mark.parametrize("seeds", [1, 2])
def test_onboarding_a_held_out_client_gives_the_numbers_of_the_run(tmp_path, seeds):
    federation = make_federation()
    names = ("fedala", "apple", "fedphp") if seeds == 1 else ("ditto",)
    result = fedala.run(
        method=",".join(names),
        dataset=federation,
        rounds=2,
        seeds=seeds,
        holdout_clients=2,
        holdout_epochs="0,1,3",
        set={"fedala.layers": 1} if seeds == 1 else {},
        out=tmp_path / "run",
        **OPTIONS,
    )
    last = hold_out_clients(federation, "2", 1)
    newcomers = select(last, [3, 4])
    for name in names:
        found = fedala.onboard(
            tmp_path / "run",
            newcomers,
            method=name,
            seed=seeds - 1,
            number=3,
            model=Net,
            device="cpu",
        )
        expected = recorded(result, name)[-6:]  # of the last seed
        assert figures(found) == expected
        assert found.round == 2


@pytest.mark.parametrize("method", ["fedala", "fedrep"])
def test_onboarding_is_joining_the_next_round(tmp_path, method):
    """A client that joins in round 3 ends with the model that it gets by onboarding after two."""
    federation = make_federation()
    known, last = range(len(SIZES) - 1), len(SIZES) - 1
    fedala.run(
        method=method, dataset=select(federation, known), rounds=2, out=tmp_path / "run", **OPTIONS
    )
    found = fedala.onboard(
        tmp_path / "run", select(federation, [last]), epochs="1", model=Net, device="cpu"
    )
    options = {name: value for name, value in OPTIONS.items() if name != "model"}
    config = Config.from_values({"method": method, "rounds": 3, **options})
    checked = plan(config, federation, Net)
    late = build_simulation(checked, checked.methods[0])
    late.draw_participants = lambda seed, round: [*known, *([last] if round == 3 else [])]
    for round in (1, 2, 3):
        evaluations = late.step(round, train=True)
    model = late.method.model_when_absent(Message(), late.clients[0, last])
    [client] = found.clients
    assert client.number == last
    assert_close({name: value[None] for name, value in client.model.items()}, model, 1e-12)
    correct, loss, samples = evaluations[0].client_scores[last]
    assert (client.scores[0], client.losses[0]) == pytest.approx(
        (correct / samples, loss / samples), abs=1e-12
    )


def test_the_global_model_does_if_there_is_no_checkpoint(tmp_path):
    federation = make_federation()
    runs = {}
    for name, keeps in (("kept", True), ("gone", False)):
        fedala.run(
            method="fedala,apple",
            dataset=select(federation, range(4)),
            rounds=1,
            keep_checkpoint=keeps,
            out=tmp_path / name,
            **OPTIONS,
        )
        runs[name] = fedala.onboard(
            tmp_path / name, select(federation, [4]), method="fedala", model=Net, device="cpu"
        )
    assert figures(runs["gone"]) == figures(runs["kept"])
    with pytest.raises(UserError, match="APPLE has more than a global model"):
        fedala.onboard(tmp_path / "gone", select(federation, [4]), method="apple", model=Net)


def test_a_run_that_stopped_early_sends_the_model_of_its_last_evaluation(tmp_path):
    federation = make_federation()
    result = fedala.run(
        method="fedavg",
        dataset=federation,
        rounds=50,
        patience=1,
        holdout_clients="last:1",
        out=tmp_path / "run",
        **OPTIONS,
    )
    found = fedala.onboard(
        tmp_path / "run", select(federation, [4]), number=4, model=Net, device="cpu"
    )
    assert found.round == result.history[-1].round < 50
    assert figures(found) == recorded(result, "fedavg")


@pytest.fixture
def images(tmp_path):
    """A run on images of bytes, and the file of a newcomer that has a single class."""
    random = np.random.default_rng(1)
    x = random.integers(0, 255, (60, 1, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "run.npz", x=x, y=np.arange(60) % 3)
    np.savez(tmp_path / "new.npz", x=x[:12], y=np.full(12, 2))
    np.savez(tmp_path / "other.npz", x=x[:12], y=np.arange(12) % 4)
    np.savez(
        tmp_path / "wide.npz",
        x=random.integers(0, 255, (9, 1, 20, 20), dtype=np.uint8),
        y=np.arange(9) % 3,
    )
    fedala.run(
        method="fedala",
        dataset=tmp_path / "run.npz",
        partition="iid",
        clients=3,
        rounds=1,
        holdout_clients=1,
        holdout_epochs="0,2",
        class_weights="balanced",
        out=tmp_path / "runs" / "mine",
        device="cpu",
    )
    return tmp_path


def test_the_command_prints_before_and_after_and_saves_the_model(images, monkeypatch):
    monkeypatch.chdir(images)
    answer = CliRunner().invoke(
        app, ["onboard", "runs/mine", "--data", "new.npz", "--out", "m.safetensors"]
    )
    assert answer.exit_code == 0, answer.output
    assert "received" in answer.output
    assert "after 2 epochs" in answer.output
    assert "after 1 round:" in answer.output
    found = fedala.onboard("runs/mine", "new.npz", device="cpu")
    [client] = found.clients
    assert (client.number, client.train_samples, client.test_samples) == (3, 9, 3)
    saved = load_file("m.safetensors")
    assert all(torch.equal(saved[name], client.model[name]) for name in saved)
    assert saved.keys() == client.model.keys()
    named = Dataset(
        "two",
        torch.zeros(8, 1, 16, 16, dtype=torch.uint8),
        torch.arange(8) % 2,
        2,
        class_names=("2", "0"),
        clients=torch.arange(8) // 4,
        client_names=("a", "b"),
    )
    both = fedala.onboard("runs/mine", named, out="models", epochs=1, device="cpu")
    assert [client.name for client in both.clients] == ["a", "b"]
    assert (images / "models" / "client-00004-b.safetensors").is_file()
    trained = fedala.load("runs/mine").with_weights("m.safetensors")
    new = np.load("new.npz")
    outputs = trained.global_model()(trained.preprocessing.prepare(new["x"]))
    assert np.array_equal(trained.predict(new["x"]), outputs.argmax(1).numpy())
    assert [one.client for one in trained.evaluate("new.npz")] == ["3"]
    for command in (
        ["predict", "runs/mine", "--data", "new.npz", "--weights", "m.safetensors"],
        ["export", "runs/mine", "--out", "n.safetensors", "--weights", "m.safetensors"],
        ["onboard", "runs/mine", "--data", "new.npz", "--out", "m.safetensors", "--force"],
    ):
        answer = CliRunner().invoke(app, command)
        assert answer.exit_code == 0, answer.output
    assert load_file("n.safetensors").keys() == saved.keys()
    with safe_open("m.safetensors", "pt") as file, safe_open("n.safetensors", "pt") as other:
        assert file.metadata() == other.metadata()
    with pytest.raises(UserError, match=r"not a \.safetensors file"):
        trained.with_weights("new.npz")
    with pytest.raises(UserError, match="leave out client and is_global"):
        trained.predict(new["x"], client=1)


def test_the_python_of_the_page_runs(images, monkeypatch, capsys):
    page = Path(__file__).parents[2] / "docs" / "new-clients.md"
    [snippet, _] = re.findall("```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(images)
    exec(snippet, {})
    assert capsys.readouterr().out.startswith("3 ")


def test_what_cannot_be_onboarded_is_refused_in_a_sentence(images, tmp_path):
    run, new = images / "runs" / "mine", images / "new.npz"
    refusals = {
        "no method 'ditto'": {"method": "ditto"},
        "no seed 7": {"seed": 7},
        "number must be at least 2": {"number": 1},
        "epochs must be whole numbers": {"epochs": "1,x"},
        "must be a .safetensors file, or a folder": {"out": tmp_path / "a.pt"},
        "exists already": {"out": new.with_suffix(".safetensors")},
    }
    new.with_suffix(".safetensors").touch()
    for sentence, options in refusals.items():
        with pytest.raises(UserError, match=sentence):
            fedala.onboard(run, new, **options)
    with pytest.raises(UserError, match="class number 3, which the run does not have"):
        fedala.onboard(run, images / "other.npz")
    with pytest.raises(UserError, match="do not fit the model"):
        fedala.onboard(run, images / "wide.npz")


def test_tables_and_summary_tell_what_newcomers_score(tmp_path):
    result = fedala.run(
        method="fedavg",
        dataset=make_federation(),
        rounds=2,
        seeds=2,
        holdout_clients=0.4,
        holdout_epochs="1,0",
        out=tmp_path / "run",
        **OPTIONS,
    )
    lines = result.newcomers
    assert [(row["seed"], row["round"], row["epochs"]) for row in lines] == [
        (seed, round, epochs) for round in range(3) for seed in (0, 1) for epochs in (0, 1)
    ]
    own = [row for row in result.methods["fedavg"].newcomer_clients if row["epochs"] == 1]
    by_hand = [np.mean([row["accuracy"] for row in own if row["seed"] == s]) for s in (0, 1)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = summary["methods"]["fedavg"]["newcomers"]
    assert found["clients"] == 2
    assert found["accuracy"]["1"]["runs"] == pytest.approx(by_hand)
    split = (tmp_path / "run" / "split.csv").read_text().splitlines()
    assert split[0].endswith(",original,held_out")
    page = fedala.report.page.write([tmp_path / "run"]).read_text()
    assert "Unseen clients" in page


def test_a_run_that_was_killed_and_resumed_has_the_same_newcomers(tmp_path):
    options = {"method": "fedala", "holdout_clients": "last:2", "holdout_epochs": "0,1", **OPTIONS}
    options |= {"rounds": 3, "checkpoint_every": 1, "dataset": make_federation()}
    fedala.run(out=tmp_path / "whole", **options)

    def kill(method, row):
        if row.round == 2:  # after its rows, and before the checkpoint of round 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fedala.run(out=tmp_path / "part", on_row=kill, **options)
    assert (tmp_path / "part" / "newcomers.csv").read_text().count("\n") == 7
    result = fedala.run(dataset=options["dataset"], model=Net, resume=tmp_path / "part")
    for name in ("newcomers.csv", "newcomer_clients.csv"):
        assert (tmp_path / "part" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert [row["round"] for row in result.newcomers] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_options_that_mean_nothing_are_refused_before_work():
    for options, sentence in (
        ({"holdout_epochs": "0,2"}, "holdout_epochs has no effect without holdout_clients"),
        ({"holdout_every": 3}, "holdout_every has no effect without holdout_clients"),
        ({"holdout_clients": "some"}, "holdout_clients must be a share"),
        ({"holdout_clients": 0.2, "holdout_epochs": "a"}, "must be whole numbers"),
    ):
        with pytest.raises(UserError, match=sentence):
            plan(Config.from_values(options), make_federation(), Net)


def test_code_that_a_folder_names_is_executed_only_if_the_user_names_it_too(own_code):
    (own_code / "net.py").write_text(
        "from pathlib import Path\n"
        "from torch import nn\n\n"
        "Path('executed').touch()\n\n\n"
        "def make(classes, shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))\n"
    )
    data = make_federation()
    fedala.run(dataset=data, model="net.py:make", method="fedala", rounds=1, out="r", device="cpu")
    (own_code / "executed").unlink()
    fresh = select(data, [0])
    with pytest.raises(UserError, match=r"executed only if you name it again: model='net.py:make'"):
        fedala.onboard("r", fresh)
    with pytest.raises(UserError, match="model of its own"):
        fedala.load("r")
    assert not (own_code / "executed").exists()
    onboarded = fedala.onboard("r", fresh, model="net.py:make", epochs="0")
    assert onboarded.clients[0].number == len(SIZES)
    assert fedala.load("r", model="net.py:make").personal(0)[1].out_features == 3


def test_imports_can_be_given_several_times(own_code):
    for name in ("fedone", "fedtwo"):
        (own_code / f"{name}.py").write_text(
            "from dataclasses import dataclass\nfrom fedala.methods.fedavg import FedAvg\n\n\n"
            f"@dataclass(frozen=True)\nclass {name.title()}(FedAvg):\n"
            f"    name, title, summary = {name!r}, {name.title()!r}, 'mine'\n"
        )
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    np.savez("new.npz", x=x[:10], y=y[:10])
    options = {"clients": 2, "partition": "iid", "rounds": 1, "device": "cpu"}
    files = ["fedone.py", "fedtwo.py"]
    fedala.run(dataset=(x, y), method="fedone,fedtwo", imports=files, out="r", **options)
    for name in ("fedone", "fedtwo"):
        registry._own_classes().pop(name)  # as in another process
    catalogue.cache_clear()
    command = "onboard r --data new.npz --method fedtwo --epochs 0 --out m.safetensors"
    imports = [word for file in files for word in ("--import", file)]
    found = CliRunner().invoke(app, [*command.split(), *imports], prog_name="fedala")
    assert found.exit_code == 0, found.output
    assert fedala.onboard("r", "new.npz", method="fedtwo", imports=files, epochs="0").clients


def test_a_newcomer_is_standardised_by_the_figures_of_the_run(tmp_path):
    random = np.random.default_rng(0)
    x, y = random.normal(50, 9, (80, 3)), random.integers(0, 2, 80)
    owners = np.arange(80) % 4
    result = fedala.run(
        dataset=(x, y), clients=owners.tolist(), method="fedavg", rounds=1, out=tmp_path / "r",
        holdout_clients="last:1", holdout_epochs="0", progress=False,
    )  # fmt: skip
    [held_out] = result.methods["fedavg"].newcomers[-1:]
    own = owners == 3
    np.savez(tmp_path / "new.npz", x=x[own], y=y[own])
    found = fedala.onboard(tmp_path / "r", tmp_path / "new.npz", epochs="0", number=3)
    assert found.clients[0].losses[0] == pytest.approx(held_out["loss"], abs=1e-6)


def test_newcomers_have_their_own_names_and_samples_as_they_are(tmp_path):
    random = np.random.default_rng(0)
    x, y = torch.from_numpy(random.normal(size=(40, 3))).float(), torch.arange(40) % 2
    owners = torch.arange(40) // 10
    data = Dataset("own", x, y, 2, clients=owners, client_names=("d", "c", "b", "a"))
    options = {"dataset": data, "method": "fedavg", "rounds": 1, "device": "cpu"}
    fedala.run(**options, feature_shift="noise:9", out=tmp_path / "r")
    federation = fedala.data.federate(data, clients=2)
    assert federation.client_names != ("d", "c")
    found = fedala.onboard(tmp_path / "r", federation, epochs="0", device="cpu").clients
    assert tuple(client.name for client in found) == federation.client_names
    assert "tensor" not in repr(found)
    trained = fedala.load(tmp_path / "r")
    for client, rows in zip(found, federation.test, strict=True):
        alone = trained.evaluate((x[rows], y[rows]))
        assert alone[None].loss == pytest.approx(client.losses[0], rel=1e-5)


@pytest.mark.parametrize("column", ["client", "shop"])
def test_newcomers_have_the_names_of_the_files_column_or_else_their_numbers(tmp_path, column):
    """In the table, in the names of the files, and in what the files say of the model."""

    def write(name, clients):
        lines = [f"{i % 3 / 3},{i % 2},{clients[i % 2]}" for i in range(40)]
        (tmp_path / name).write_text("\n".join([f"a,label,{column}", *lines]) + "\n")
        return tmp_path / name

    named = {} if column == "client" else {"clients_by": column}
    options = {"method": "fedavg", "rounds": 1, "device": "cpu", **named}
    fedala.run(dataset=write("run.csv", ["ada", "bob"]), out=tmp_path / "run", **options)
    new = write("new.csv", ["kim", "lee"])
    arguments = ["onboard", str(tmp_path / "run"), "--data", str(new), "--out", str(tmp_path / "m")]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    assert re.search(r"\n +kim .*\n +lee ", answer.stdout)
    files = sorted((tmp_path / "m").iterdir())
    assert [file.name for file in files] == [
        "client-00002-kim.safetensors", "client-00003-lee.safetensors",
    ]  # fmt: skip
    with safe_open(files[0], "pt") as file:
        assert file.metadata()["client"] == "kim"
    new.write_text(new.read_text().replace("label", "kind"))
    with pytest.raises(UserError, match=r"no label column: .* \(label, class, target or y\), and"):
        fedala.onboard(tmp_path / "run", new)
    x, y = np.arange(20).reshape(20, 1) / 20, np.arange(20) % 2
    for data, names in (({"kim": (x, y)}, ["kim"]), ([(x, y), (x, y)], ["2", "3"])):
        found = fedala.onboard(tmp_path / "run", data, epochs=0, device="cpu").clients
        assert [client.name for client in found] == names


def test_new_data_may_be_a_file_or_in_memory_and_need_not_name_their_client(tmp_path):
    rows = [f"{'ab'[i % 2]},{'ab'[i % 2]} w{i % 5} x,s{i % 2}" for i in range(40)]
    for name, head, end in (("run", "kind,text,shop", None), ("new", "kind,text", -3)):
        lines = [head, *(row[:end] for row in rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "other.csv").write_text("sort,text\na,b\n")
    fedala.run(
        dataset=tmp_path / "run.csv",
        clients_by="shop",
        label_column="kind",
        method="fedavg",
        rounds=1,
        device="cpu",
        out=tmp_path / "r",
    )
    texts, labels = zip(*((row.split(",")[1], row[0]) for row in rows), strict=True)
    found = [
        fedala.onboard(tmp_path / "r", data, epochs=[0, 1], device="cpu")
        for data in (
            tmp_path / "new.csv",
            (list(texts), list(labels)),
            fedala.data.make_dataset((["a longer text than those", *texts], ["a", *labels])),
        )
    ]
    assert found[0].clients[0].losses == found[1].clients[0].losses
    assert found[2].clients[0].train_samples == 30
    assert re.search("new.csv has no shop, .* it is one client", found[0].notes[0])
    for shown in (repr(found[0]), found[0]._repr_html_(), repr(found[0].clients)):
        assert "tensor" not in shown
        assert len(shown) < 700
    assert "initialised  after 1 epoch\n" in repr(found[0])
    for data, sentence in (
        (tmp_path / "other.csv", "no column kind, which holds the labels in the run"),
        (3, "The new data is of the type int; data are a pair"),
        ((np.zeros((4, 3), "float32"), ["a", "b"] * 2), "holds numbers, and .* are texts"),
    ):
        with pytest.raises(UserError, match=sentence):
            fedala.onboard(tmp_path / "r", data, device="cpu")
