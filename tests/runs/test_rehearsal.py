"""A user's method does a few rounds with two samples before its run: mistakes show there."""

import textwrap

import pytest
from typer.testing import CliRunner

from fedala.cli.app import app
from fedala.methods import import_methods
from fedala.runs.config import Config
from fedala.runs.job_process import _plan_job
from fedala.runs.plan import plan

HEAD = """
import torch
from fedala.lanes import Message
from fedala.methods import Method

class Mine(Method):
    name, title, summary = "mine", "Mine", "FedAvg"
    has_personal_models = False
"""
OPTIONS = "--method mine --rounds 2 --clients 3 --batch-size 200 --device cpu --out new"


@pytest.fixture
def call(own_code):
    """Return a function that runs a method whose class has a body; nothing is left behind."""

    def call(body, *options):
        (own_code / "mine.py").write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    "))
        return CliRunner().invoke(app, ["run", "--import", "mine.py", *OPTIONS.split(), *options])

    return call


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            """
            def init_server(self, task, initial, server_round):
                return {"global": initial, "rounds": 0}
            """,
            "Mine: init_server returns an int under 'rounds'.",
        ),
        (
            """
            def init_client(self, task, initial):
                return {"seen": {"samples": 0.0}}
            """,
            "Mine: init_client returns a float under 'seen/samples'.",
        ),
        (
            """
            def aggregate(self, server, uploads, server_round):
                for name, value in uploads.average().model.items():
                    if value.is_floating_point():
                        server["global"][name].add_(value - server["global"][name])
                return server
            """,
            "Mine: aggregate changes server/global/conv1.weight, ",
        ),
        (
            """
            def aggregate(self, server, uploads, server_round):
                server["global"] = uploads.average().model
                return server
            """,
            "Mine: aggregate changes server/global/conv1.weight, ",
        ),
        (
            """
            def initialize(self, cohort, received, state):
                received.model["fc2.bias"].mul_(0.9)
                return received.model, state
            """,
            "Mine: initialize changes received/model/fc2.bias, ",
        ),
        (
            """
            def aggregate(self, server, uploads, server_round):
                momentum = uploads.average().model["fc2.bias"]
                if "momentum" in server:
                    momentum = server["momentum"].mul_(0.9).add_(momentum)
                return {**server, "momentum": momentum}
            """,
            "Mine: aggregate changes server/momentum, ",
        ),
        (
            """
            def init_client(self, task, initial):
                return {"m": torch.zeros(len(initial["fc2.bias"]))}

            def train(self, cohort, initialized, received, state):
                return Message(cohort.fit(initialized)), {"m": torch.zeros(1)}
            """,
            "Mine: train returns a tensor of float32 (1,) under 'state/m'. Its first dimension",
        ),
        (
            """
            def model_when_absent(self, upload, state):
                return None
            """,
            "Mine: model_when_absent must return a dict of tensors, and it returns None.",
        ),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(call, own_code, body, says):
    options = ["--join-ratio", "0.5"] if "model_when_absent" in body else []
    if options:
        body = f"has_personal_models = True\n{textwrap.dedent(body)}"
    answer = call(body, *options)
    assert answer.exit_code == 2, answer.output
    assert answer.stderr.replace("\n", " ").startswith(f"Error: {says}")
    assert not (own_code / "new").exists()


def test_a_method_that_two_samples_do_not_serve_is_taken(call):
    """What fails for want of samples alone is not refused, and the run is as it would be."""
    answer = call("""
        def train(self, cohort, initialized, received, state):
            if min(cohort.sizes()) < 5:
                raise ValueError("too few")
            return super().train(cohort, initialized, received, state)
    """)
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    "body",
    [
        """
        def aggregate(self, server, uploads, server_round):
            if len(server_round.clients) < 6:
                raise UserError("Krum needs at least 6 clients.")
            return super().aggregate(server, uploads, server_round)
        """,
        """
        def init_server(self, task, initial, server_round):
            if len(server_round.clients) < 6:
                raise UserError("Krum needs at least 6 clients.")
            return super().init_server(task, initial, server_round)
        """,
    ],
)
def test_a_method_may_refuse_few_clients(call, body):
    """The rehearsal has fewer clients than the run, and only the run's are too few."""
    begin = textwrap.dedent(body).replace("raise", "from fedala.errors import UserError; raise")
    for clients, code in (("6", 0), ("5", 2)):
        answer = call(begin, "--clients", clients, "--rounds", "1", "--force")
        assert answer.exit_code == code, answer.output
    assert "Krum needs at least 6 clients." in answer.stderr


def test_newcomers_do_not_make_clients_fewer_for_a_method(call):
    answer = call(
        """
        def init_server(self, task, initial, server_round):
            if len(server_round.clients) < 5:
                raise RuntimeError("too few")
            return super().init_server(task, initial, server_round)
        """,
        *["--clients", "6", "--holdout-clients", "1"],
    )
    assert answer.exit_code == 0, answer.output


# --- how often ------------------------------------------------------------------------------------

COUNTING = """
from dataclasses import dataclass
from fedala.options import option

@dataclass(frozen=True)
class Mine(Method):
    name, title, summary = "mine", "Mine", "FedAvg"
    has_personal_models = False
    mu: float = option(0.5, "a number")
    steps: int = option(1, "another")

    def train(self, cohort, initialized, received, state):
        with open("widths", "a") as file:
            file.write(f"{len(cohort)} ")
        return super().train(cohort, initialized, received, state)
"""


@pytest.fixture
def rehearsed_widths(own_code):
    """Return a function that plans a run; it returns the cohort of each training."""
    code = HEAD[: HEAD.index("class")] + COUNTING

    def list_widths(prepare=plan, **options):
        (own_code / "mine.py").write_text(code)
        import_methods(["mine.py"])
        values = {"imports": ["mine.py"], "method": "mine", "clients": 3, "device": "cpu"}
        if prepare is plan:
            plan(Config.from_values({**values, **options}))
        else:
            prepare({**values, **options}, {"device": "cpu", "number": 0})
        path = own_code / "widths"
        return path.read_text().split() if path.exists() else []

    return list_widths


@pytest.mark.parametrize("join_ratio", [1.0, 0.3])
def test_a_rehearsal_has_a_round_one_by_one_and_a_round_side_by_side(rehearsed_widths, join_ratio):
    assert rehearsed_widths(join_ratio=join_ratio) == ["1", "1", "2"]


@pytest.mark.parametrize(
    ("sweep", "rehearsals"),
    [
        ({"lr": "0.1,0.01,0.001"}, 1),
        ({"batch_size": "5,10"}, 1),
        ({"mine.mu": "0.1,0.5,1"}, 1),
        ({"mine.mu": "0,0.5,1"}, 2),
        ({"mine.steps": "1,2,3", "lr": "0.1,0.01"}, 3),
        ({"momentum": "0,0.5,0.9"}, 2),
    ],
)
def test_points_of_a_sweep_that_take_the_same_steps_are_rehearsed_once(
    rehearsed_widths, sweep, rehearsals
):
    assert len(rehearsed_widths(sweep=sweep)) == 3 * rehearsals


def test_all_methods_are_rehearsed_once(rehearsed_widths, monkeypatch):
    names = ["fedavg", "mine"]
    monkeypatch.setattr("fedala.runs.all_methods.list_methods", lambda: names)
    assert len(rehearsed_widths(method=",".join(names))) == 3


def test_a_job_leaves_the_rehearsal_to_the_process_that_started_it(rehearsed_widths):
    assert rehearsed_widths(_plan_job) == []
