"""Onboard clients that were not there during training, with the server of a finished run.

A newcomer receives what the server would send in the round after the last one, initialises its
model, trains on its own samples and keeps its personal model. The data of the run are not needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedala.data import Dataset, Federation
from fedala.data.catalogue import LENGTH
from fedala.data.columns import Wanted
from fedala.data.dataset import PARTS
from fedala.data.federation import split_share
from fedala.data.load import load_more
from fedala.data.matching import match_classes
from fedala.errors import UserError, printable
from fedala.io import files
from fedala.io.user_code import is_reference
from fedala.lanes.losses import LossFunction
from fedala.lanes.messages import drop_transient
from fedala.lanes.normalization import NONE, is_standard
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, take
from fedala.methods import setting_prefixes
from fedala.metrics import Metric
from fedala.runs.build import build_task, count_lanes
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.holdout import check_method, parse_epochs
from fedala.runs.models import pack_model
from fedala.runs.own_code import import_given
from fedala.runs.plan import plan
from fedala.runs.provenance import keep_layers
from fedala.runs.server_state import MOST_CLIENTS, FinishedRun, find_run
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.model_scores import EvaluationSchedule
from fedala.simulation.newcomers import Arrival, Newcomers
from fedala.simulation.transport import Setup


@dataclass(frozen=True)
class OnboardedClient:
    """One newcomer: what its models score on its test samples, and its personal model."""

    number: int
    name: str
    train_samples: int
    test_samples: int
    received: float | None
    """The score of the received model; None if the server sends no whole model."""
    scores: dict[int, float]
    """By local epochs; 0 is the initialised model. NaN without test samples."""
    losses: dict[int, float]
    model: dict[str, Tensor] = field(repr=False)
    """The personal model after the most epochs, by name."""
    file: Path | None = None


@dataclass(frozen=True)
class Onboarding:
    """Clients that were onboarded to one method and seed of a run."""

    title: str
    seed: int
    round: int
    """How many rounds the server had been trained for."""
    metric: Metric
    clients: list[OnboardedClient]


def onboard(
    run: Path | str,
    data: str | Path | Dataset | Federation,
    *,
    method: str | None = None,
    seed: int | None = None,
    epochs: str | int | None = None,
    number: int | None = None,
    out: Path | str | None = None,
    device: str = "auto",
    model: str | Callable[[], nn.Module] | None = None,
    loss: LossFunction | None = None,
    imports: str | None = None,
) -> Onboarding:
    """Onboard the clients in `data` to a run: `onboard("runs/mine", "new.npz", method="fedala")`.

    `data` are the samples of one client, or of several if they name their clients; they are split
    as they say, or 75/25. A `Federation` is taken as it is. `epochs` such as `0,1,5` are the local
    epochs after which the client is tested; by default, `holdout_epochs` of the run. `number` is
    that of the first client, by default the next after the run's. `out` is the file of the
    personal model, or a folder for those of several clients. Give code of your own that the run
    was made with again: a `model` (a function, or its name such as `net.py:make`), a `loss`, and
    `imports` for methods.
    """
    folder = RunFolder.open(Path(run))
    _check_code_is_named(folder, model, imports)
    import_given({"imports": imports})
    finished = find_run(folder, method, seed)
    check_method(finished.member.method)
    for name, given in (("model", model), ("loss", loss)):
        if getattr(finished.config, name) == "own" and given is None:
            raise UserError(
                f"{run} was made in Python with its own {name}: onboard clients there, with "
                f"onboard(…, {name}=…)."
            )
    counts = _choose_epochs(finished.config, epochs)
    first = _choose_number(finished, number)
    federation = _make_federation(finished, data, first)
    targets = _choose_files(out, range(first, first + federation.held_out))
    task, start = _build_task(finished, federation, device, model, loss)
    initial = start(finished.seed)
    round, server = finished.load_server(task, initial)
    setup = Setup(
        finished.member.method,
        task,
        [initial],
        [finished.seed],
        int(finished.config.rounds or 1),
        finished.config.join_ratio,
        ["test"],
        held_out=federation.held_out,
    )
    transport = LocalTransport(setup, lanes=count_lanes(finished.config.lanes, task.device))
    newcomers = Newcomers(setup, transport, EvaluationSchedule(setup.rounds, 1), counts)
    devices = [task.device] if task.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        arrivals = newcomers.arrive(
            [server], [finished.server_round(round + 1)], keeps_models=True, tests_received=True
        )
    clients = [
        _collect(arrival, position, task, federation.client_names, targets.get(client))
        for arrival in arrivals
        for position, (_, client) in enumerate(arrival.lanes)
    ]
    clients.sort(key=lambda client: client.number)
    metric = task.loss.metric
    return Onboarding(finished.member.title, finished.seed, round, metric, clients)


def _check_code_is_named(folder: RunFolder, model: Any, imports: str | None) -> None:
    """Refuse to execute code because a run folder names it: the user must name it, too."""
    config = folder.config()
    for flag, named, given in (
        ("--import", config.imports, imports),
        ("--model", config.model if is_reference(config.model) else None, model),
    ):
        if named and given is None:
            raise UserError(
                f"{folder.path} was made with code of its own, {printable(str(named), 200)}, which "
                f"is executed only if you name it again: {flag} {printable(str(named), 200)}."
            )


def _choose_epochs(config: Config, epochs: str | int | None) -> tuple[int, ...]:
    text = config.holdout_epochs if epochs is None else str(epochs)
    return tuple(sorted({0, *parse_epochs(text, "epochs")}))


def _choose_number(finished: FinishedRun, number: int | None) -> int:
    """Return the number of the first newcomer, by default the next that is free."""
    if number is None:
        return int(finished.config.clients or 0)
    if not finished.population <= number <= MOST_CLIENTS:
        raise UserError(
            f"number must be at least {finished.population}: the numbers before are those of the "
            f"clients that took part in the run. It may be at most {MOST_CLIENTS}, and is {number}."
        )
    return number


def _make_federation(
    finished: FinishedRun, data: str | Path | Dataset | Federation, first: int
) -> Federation:
    """Return the newcomers as the clients from a number on; the ones before have no samples."""
    if isinstance(data, Federation):
        own, dataset = data, data.dataset
    else:
        dataset = _load(finished, data)
        own = _divide(dataset, finished.config, first)
    nothing = (np.arange(0),) * first
    parts: dict[str, Any] = {part: (*nothing, *getattr(own, part)) for part in PARTS}
    names = tuple(map(str, range(first))) + own.client_names if own.client_names else ()
    return Federation(dataset, **parts, client_names=names, held_out=len(own.train))


def _load(finished: FinishedRun, data: str | Path | Dataset) -> Dataset:
    """Return the new samples with the classes of the run."""
    config, fed = finished.config, finished.folder.preprocessing()
    names = fed.class_names if fed and fed.class_names else finished.class_names
    if not isinstance(data, Dataset):
        return load_more(
            str(data),
            names,
            config.resize,
            Wanted(config.clients_by, config.label_column),
            tokens=fed.tokens if fed else (),
            length=fed.shape[0] if fed else LENGTH,
            feature_names=fed.feature_names if fed else (),
        )
    if data.kind != "classes":
        return data
    y = match_classes(data.y.numpy(), data.class_names, names, data.name)
    return replace(data, y=torch.from_numpy(y), classes=len(names), class_names=names)


def _divide(dataset: Dataset, config: Config, first: int) -> Federation:
    """Give each client its samples: in the order of the data if they say how they are split."""
    owners = np.zeros(len(dataset.y)) if dataset.clients is None else dataset.clients.numpy()
    splits = []
    for client in range(max(1, len(dataset.client_names))):
        share = np.flatnonzero(owners == client)
        if dataset.split is None:
            splits.append(split_share(share, config.partition_seed, first + client))
        else:
            given = dataset.split.numpy()[share]
            splits.append({part: share[given == i] for i, part in enumerate(PARTS)})
    parts: dict[str, Any] = {part: tuple(own[part] for own in splits) for part in PARTS}
    return Federation(dataset, **parts, client_names=dataset.client_names)


def _build_task(
    finished: FinishedRun,
    federation: Federation,
    device: str,
    model: str | Callable[[], nn.Module] | None,
    loss: LossFunction | None,
) -> tuple[Task, Callable[[int], Params]]:
    """Return the task of the newcomers alone, and a function that makes the initial model."""
    config, usual = finished.member.config, Config()
    if config.class_weights == "balanced":
        config = replace(config, class_weights=_balance(finished, federation.dataset))
    prefixes = setting_prefixes(config.method)
    settings = {key: one for key, one in config.set.items() if key.partition(".")[0] in prefixes}
    config = replace(
        config,
        imports=None,
        model=model if isinstance(model, str) else config.model,
        set=settings,
        device=device,
        feature_shift=None,  # new samples are what they are
        holdout_clients=None,
        holdout_epochs=usual.holdout_epochs,
        holdout_every=usual.holdout_every,
    )
    figures = None
    if is_standard(config.normalize):  # fitted on the samples of the run's clients
        fed = finished.folder.preprocessing()
        if fed is None:
            raise UserError(
                f"{finished.folder.path} has no preprocessing.json, so nothing says how the run's "
                "samples were standardised: run it with save_models."
            )
        config, figures = replace(config, normalize=NONE), fed.normalization
    planned = plan(config, federation, None if isinstance(model, str) else model, loss)
    planned = keep_layers(planned, finished.folder.record)
    return build_task(replace(planned, normalization=figures) if figures else planned)


def _balance(finished: FinishedRun, dataset: Dataset) -> str:
    """Return the class weights of the run as numbers: they count the samples of its clients."""
    if dataset.kind != "classes":
        raise UserError(
            "class_weights = balanced of several labels counts the samples of the run's clients, "
            "which its folder does not have: run it with a number for each label."
        )
    counts = finished.count_by_class()
    own = np.array([counts.get(label, 0) for label in range(dataset.classes)])
    weights = np.where(own > 0, own.sum() / len(own) / np.maximum(own, 1), 1.0)
    return ",".join(map(repr, weights.tolist()))


def _choose_files(out: Path | str | None, numbers: Sequence[int]) -> dict[int, Path]:
    """Return the file of each client's model. Refuse one that exists already."""
    if out is None:
        return {}
    path = Path(out)
    if path.suffix == ".safetensors":
        if len(numbers) > 1:
            raise UserError(
                f"The data hold {len(numbers)} clients, and {path} is one file: name a folder."
            )
        targets = {numbers[0]: path}
    else:
        targets = {number: path / f"client-{number:05d}.safetensors" for number in numbers}
    for target in targets.values():
        if target.exists():
            raise UserError(f"{target} exists already: choose another place for the model.")
    parent = path.absolute().parent if path.suffix == ".safetensors" else path
    if path.suffix == ".safetensors" and not parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}.")
    if parent.exists() and not parent.is_dir():
        raise UserError(f"{path} is a file: name a .safetensors file, or a folder.")
    return targets


def _collect(
    arrival: Arrival, lane: int, task: Task, names: Sequence[str], target: Path | None
) -> OnboardedClient:
    """Return one client's results, and write its model if it has a file."""
    client = arrival.lanes[lane][1]
    figures = {count: scores[lane].tolist() for count, scores in arrival.scores.items()}
    last = max(arrival.models)
    model = drop_transient(task, take(arrival.models[last], slice(lane, lane + 1)))
    if target:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            files.write_file(target, pack_model(model))
        except OSError as error:
            raise UserError(f"The model cannot be written to {target}: {error}.") from None
    received = arrival.received
    return OnboardedClient(
        client,
        names[client] if names else str(client),
        task.size(client),
        task.size(client, "test"),
        None if received is None else _share(*received[lane, [0, 2]].tolist()),
        {count: _share(score, samples) for count, (score, _, samples) in figures.items()},
        {count: _share(total, samples) for count, (_, total, samples) in figures.items()},
        {name: value[0].to("cpu", copy=True) for name, value in model.items()},
        target,
    )


def _share(total: float, samples: float) -> float:
    return total / samples if samples else float("nan")
