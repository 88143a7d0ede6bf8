"""A trained federation: the personal models of all clients and the global one, ready for use."""

from collections.abc import Mapping, Sequence
from copy import copy
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedala.data import Federation, hold_out_clients
from fedala.data.columns import CLIENTS
from fedala.data.frames import is_frame
from fedala.data.inputs import is_table
from fedala.data.preprocessing import Preprocessing
from fedala.errors import UserError
from fedala.lanes.losses import LossFunction
from fedala.metrics import Metric
from fedala.options import name_option, suggest
from fedala.runs.config import Config
from fedala.runs.holdout import count_known
from fedala.trained.answers import Answers
from fedala.trained.export import export_model
from fedala.trained.modules import ModelBuilder, list_saved_names, read_weights
from fedala.trained.samples import (
    NamedInputs,
    Shares,
    divide_by_client,
    prepare_inputs,
    prepare_samples,
)
from fedala.trained.saved_run import SavedRun, list_few
from fedala.trained.scores import (
    Client,
    Examiner,
    ModelScore,
    Scores,
    as_name,
    compute_outputs,
    find_loss,
    have_numbers,
)

#: Models that `predict` keeps ready.
MOST_READY = 16


class TrainedFederation:
    """The models of one run: a method with a seed, as its last or best evaluation tested them.

    `fedala.load` makes it. Nothing is trained here, and nothing in the run folder is changed.
    """

    def __init__(
        self,
        run: SavedRun,
        preprocessing: Preprocessing,
        builder: ModelBuilder,
        client_names: tuple[str, ...] = (),
        loss: LossFunction | None = None,
    ) -> None:
        self.preprocessing = preprocessing
        self._run, self._builder, self._loss = run, builder, loss
        self._client_names = client_names
        self._ready: dict[int | None, nn.Module] = {}
        self._skeletons: dict[frozenset[str], nn.Module] = {}
        self._given: tuple[str, dict[str, Tensor]] | None = None

    # --- what it is -----------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The options of the run."""
        return self._run.config

    @property
    def method(self) -> str:
        return self._run.method

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods of the run folder whose models were saved."""
        return self._run.methods

    @property
    def seed(self) -> int:
        return self._run.seed

    @property
    def clients(self) -> tuple[Client, ...]:
        """The clients that took part in training, by name, or by number if the data name none."""
        count = count_known(self.config)
        return self._client_names[:count] or tuple(range(count))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; none if the data did not name them."""
        return self.preprocessing.class_names

    @property
    def metric(self) -> Metric:
        """What `evaluate` measures: the metric of the run."""
        return self._run.metric

    def __repr__(self) -> str:
        when = "best" if self._run.best else "last"
        kind = "personal models" if self.has_personal_models else "one global model"
        return (
            f"TrainedFederation({str(self._run.folder.path)!r}: {self.method}, seed {self.seed}, "
            f"{when} evaluation, {self.config.model}, {len(self.clients)} clients, {kind})"
        )

    # --- models ---------------------------------------------------------------------------------

    def personal(self, client: int | str) -> nn.Module:
        """Build a client's personal model; of a method that has none, the global model.

        It is a new module at each call, in evaluation mode. Feed it with `preprocessing.prepare`.
        """
        return self._builder.build(self._read(self.find_client(client)))

    def with_weights(self, path: Path | str) -> "TrainedFederation":
        """Return the same with one model only: that of a client which `fedala.onboard` wrote.

        `predict`, `evaluate`, `export` and `global_model` use it, and no client is to be named.
        """
        weights, name = read_weights(Path(path))
        self._builder.check(self._get_skeleton(weights), weights)
        other = copy(self)
        other._ready, other._given = {}, (name, weights)
        return other

    def global_model(self) -> nn.Module:
        """Build the global model. Some methods have none."""
        return self._builder.build(self._read(None))

    @property
    def has_personal_models(self) -> bool:
        """Whether the clients have models of their own."""
        return self._run.has_personal_models

    @property
    def has_global_model(self) -> bool:
        """Whether the run saved a whole global model."""
        if None not in self._run.clients:
            return False
        weights = self._run.read(None)
        return list_saved_names(self._get_skeleton(weights)) <= weights.keys()

    def _get_skeleton(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return the structure of the model that has these weights.

        A personal model may have more parameters than the global one, if the method adds some.
        """
        names = frozenset(weights)
        if names not in self._skeletons:
            self._skeletons[names] = self._builder.build_skeleton(names)
        return self._skeletons[names]

    def find_client(self, client: int | str) -> int:
        """Return the number of a client that is given by its name or number.

        If clients are called by numbers, such as hospitals 1, 2 and 10, a number is a name.
        """
        self._refuse_choice()
        count, names = len(self.clients), self._client_names
        if isinstance(client, bool) or not isinstance(client, str | Integral):
            raise UserError(f"A client is a number or a name, not {type(client).__name__}.")
        name = as_name(client, names)
        if name in names:
            number = names.index(str(name))
        elif have_numbers(names):
            known = list_few([str(name) for name in self.clients])
            raise UserError(f"There is no client {client}; the clients are called {known}.")
        elif isinstance(client, str) and not client.isdecimal():
            raise UserError(
                f"There is no client {client!r}{suggest(client, names)}; "
                f"the clients have the numbers 0 to {count - 1}."
            )
        else:
            number = int(client)
        if count <= number < int(self.config.clients or 0):
            raise UserError(
                f"Client {client} was held out, so it has no model: fedala onboard gives it one."
            )
        if not 0 <= number < count:
            raise UserError(f"There is no client {number}: there are 0 to {count - 1}.")
        return number

    def choose_model(self, client: int | str | None, *, is_global: bool = False) -> int | None:
        """Return the number of the client whose model is meant; None: the global one.

        Nothing is guessed: if clients have models of their own, either must be named.
        """
        if client is not None and is_global:
            both = f"{name_option('client')} or {name_option('is_global', True)}"
            raise UserError(f"Give either {both}, not both.")
        if client is not None:
            return self.find_client(client)
        if is_global:
            self._refuse_choice()
        elif self.has_personal_models and self._given is None:
            raise UserError(
                f"Each of the {len(self.clients)} clients has its own model: name one with "
                f"{name_option('client')}, or take the global one with "
                f"{name_option('is_global', True)}."
            )
        return None

    def _refuse_choice(self) -> None:
        if self._given is not None:
            which = f"{name_option('client')} and {name_option('is_global')}"
            raise UserError(f"These weights are those of one client: leave out {which}.")

    def _read(self, client: int | None) -> dict[str, Tensor]:
        """Return the saved weights of a client, or of the global model."""
        if self._given is not None:
            return self._given[1]
        run = self._run
        if client is not None and not run.has_personal_models:
            client = None
        if client not in run.clients:
            if client is None:
                raise UserError(f"{self.method} has no global model: name a client.")
            raise UserError(
                f"{run.folder.path} has no model of client {client}: "
                f"only {len(run.clients - {None})} clients have one."
            )
        weights = run.read(client)
        skeleton = self._get_skeleton(weights)
        missing = list_saved_names(skeleton) - weights.keys()
        if client is None and run.has_personal_models and missing:
            raise UserError(
                f"{self.method} has no whole global model, because its clients keep "
                f"{min(missing)} to themselves: name a client."
            )
        self._builder.check(skeleton, weights)
        return weights

    # --- predict --------------------------------------------------------------------------------

    def predict(
        self,
        data: Any,
        client: int | str | None = None,
        *,
        is_global: bool = False,
        probabilities: bool = False,
    ) -> "np.ndarray[Any, Any]":
        """Return what a client's model says of raw samples, or with `is_global` the global model.

        `data` is what `preprocessing.prepare` takes, a `Dataset`, or the path of a file or folder.
        The answer is the name of each sample's class, or its number if classes have no names; with
        `probabilities`, [sample, class]. Runs with several labels or with numbers as targets give
        zeros and ones, or numbers.
        """
        number = self.choose_model(client, is_global=is_global)
        answers = self.answer(prepare_inputs(data, self.preprocessing), number)
        return answers.probabilities() if probabilities else answers.predictions()

    def answer(self, inputs: NamedInputs, client: int | None) -> Answers:
        """Return what a model of `choose_model` says of prepared samples, in all forms."""
        model = self._get_ready(client)
        outputs = compute_outputs(model, inputs.x, self.config.precision)
        return Answers.of(outputs, self.preprocessing, self.metric)

    def _get_ready(self, client: int | None) -> nn.Module:
        """Return a model that has been built before, if it has: a server predicts again and again.

        Models come and go by their use, so that many clients do not fill the memory.
        """
        model = self._ready.pop(client, None) or self._builder.build(self._read(client))
        self._ready[client] = model
        while len(self._ready) > MOST_READY:
            del self._ready[next(iter(self._ready))]
        return model

    # --- evaluate -------------------------------------------------------------------------------

    def evaluate(
        self, data: Any, client: int | str | None = None, *, label_column: str | None = None
    ) -> Scores:
        """Return what models score on new data, with the metric and the loss of the run.

        `data` is a path, a pair (inputs, targets), a DataFrame with labels, a `Dataset` or a
        `DataLoader`. Without a client, all personal models and the global one are tested on all
        samples. With a `Federation`, each client's model is tested on that client's own test
        samples, and with a table that names the run's clients as the run's data did, on that
        client's rows; a `client` is tested on all of them. Of a table, `label_column` is the column
        of the labels, if it is not that of the run.
        """
        loss = find_loss(self.config, self.metric, self._loss)
        shares = self._list_shares(data)
        if isinstance(data, Federation):
            data = data.dataset
        is_divided = client is None and self._given is None
        samples = prepare_samples(
            data,
            self.preprocessing,
            label_column or self._find_labels(data),
            self._name_clients_column() if is_divided else (),
        )
        notes: tuple[str, ...] = ()
        if samples.clients is not None:
            shares, notes = divide_by_client(samples.clients, self.clients)
        examiner = Examiner(self._get_skeleton({}), samples, self.config.precision, loss)

        def score(name: Client, number: int | None, rows: np.ndarray | None = None) -> ModelScore:
            weights = self._read(number)
            return examiner.score(name, weights, self._get_skeleton(weights), rows)

        if self._given is not None:
            number = None if client is None else self.find_client(client)
            return Scores(self.metric, (score(self._given[0], number),))
        found = []
        for number in self._list_tested(client, shares):
            name = None if number is None else self.clients[number]
            found.append(score(name, number, shares.get(number)))
        return Scores(self.metric, tuple(found), notes)

    def _find_labels(self, data: Any) -> str | None:
        """Return the column of the labels of a table, as the run had it."""
        is_path = isinstance(data, str | Path) and is_table(Path(data))
        return self.config.label_column if is_path or is_frame(data) else None

    def _name_clients_column(self) -> tuple[str, ...]:
        """Return what the column may be called that names the clients as the run's data did."""
        if not self._client_names:
            return ()
        return CLIENTS if self.config.clients_by is None else (self.config.clients_by,)

    def _list_tested(self, client: int | str | None, shares: Shares) -> list[int | None]:
        """Return whose models are tested; None: the global one."""
        if client is not None:
            return [self.find_client(client)]
        # On the same samples, clients without models of their own would all score the same.
        numbers = range(len(self.clients)) if self.has_personal_models or shares else ()
        tested: list[int | None] = [k for k in numbers if not shares or k in shares]
        return [*tested, None] if self.has_global_model else tested

    def _list_shares(self, data: Any) -> Shares:
        """Return the test samples of each client, and of all, if the data is divided."""
        if not isinstance(data, Federation):
            return {}
        tests = self._match_clients(data)
        return {**dict(enumerate(tests)), None: np.concatenate(tests)}

    def _match_clients(self, federation: Federation) -> "Sequence[np.ndarray[Any, Any]]":
        """Return the test samples of the run's clients: by name, or in the order of the run.

        Clients that are held out change the order.
        """
        names, which = federation.client_names, self.config.holdout_clients
        if names and self._client_names:
            number = {name: position for position, name in enumerate(names)}
            for name in self.clients:
                if name not in number:
                    raise UserError(f"The federation has no client {name!r}, and the run has.")
            return [federation.test[number[str(name)]] for name in self.clients]
        if which and not federation.held_out and len(federation.test) == self.config.clients:
            federation = hold_out_clients(federation, which, self.config.partition_seed)
        tests = federation.known.test
        if len(tests) != len(self.clients):
            raise UserError(
                f"The federation has {len(tests)} clients, and the run {len(self.clients)}."
            )
        return tests

    # --- export ---------------------------------------------------------------------------------

    def export(
        self, path: Path | str, client: int | str | None = None, *, is_global: bool = False
    ) -> Path:
        """Write a client's model, or with `is_global` the global one, for use without this package.

        The ending decides: `.safetensors` (weights), `.pt2` (a program for `torch.export.load`) or
        `.onnx`. The programs take raw samples: bytes of images or unscaled features, or token ids.
        """
        number = self.choose_model(client, is_global=is_global)
        about = {
            "run": str(self._run.folder.path.name),
            "method": self.method,
            "seed": self.seed,
            "client": None if number is None else self.clients[number],
            **({"client": self._given[0]} if self._given else {}),
            "model": self.config.model,
        }
        model = self._builder.build(self._read(number))
        return export_model(Path(path), model, self.preprocessing, about)
