"""A user's method does a few rounds with two samples before its run: mistakes show there."""

import textwrap

import pytest
from typer.testing import CliRunner

from fedala.cli.app import app

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
