"""Onboard clients that were not there during training, with the server of a finished run.

A newcomer receives what the server would send in the round after the last one, initialises its
model, trains on its own samples and keeps its personal model. The data of the run are not needed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save as pack_tensors
from torch import nn

from fedala.data import Dataset, Federation
from fedala.errors import UserError, printable
from fedala.io import files
from fedala.io.user_code import is_reference
from fedala.lanes.heads import extend_task
from fedala.lanes.losses import LossFunction
from fedala.lanes.messages import drop_transient
from fedala.lanes.normalization import NONE, is_standard
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, take
from fedala.methods import setting_prefixes
from fedala.options import name_option
from fedala.runs.build import build_task, cohort_options
from fedala.runs.config import Config
from fedala.runs.devices import use_device
from fedala.runs.folder import RunFolder
from fedala.runs.holdout import check_method, parse_epochs
from fedala.runs.newcomer_data import make_federation
from fedala.runs.onboarding import OnboardedClient, Onboarding
from fedala.runs.outputs import check_overwriting
from fedala.runs.own_code import import_given
from fedala.runs.plan import plan
from fedala.runs.provenance import keep_layers
from fedala.runs.results import RunResult, locate_folder
from fedala.runs.server_state import MOST_CLIENTS, FinishedRun, find_run
from fedala.simulation.local_transport import LocalTransport
from fedala.simulation.model_scores import EvaluationSchedule
from fedala.simulation.newcomers import Arrival, Newcomers
from fedala.simulation.transport import Setup


def onboard(
    run: Path | str | RunResult,
    data: Any,
    *,
    method: str | None = None,
    seed: int | None = None,
    epochs: str | int | Sequence[int] | None = None,
    number: int | None = None,
    out: Path | str | None = None,
    force: bool = False,
    device: str = "auto",
    model: str | Callable[[], nn.Module] | None = None,
    loss: LossFunction | None = None,
    imports: str | Sequence[str] | None = None,
) -> Onboarding:
    """Onboard the clients in `data` to a run: `onboard("runs/mine", "new.npz", method="fedala")`.

    `run` is a run folder, or the result of a run that has one. `data` are the samples of one
    client, or of several if they name their clients: a path, or what `fedala.run` takes as
    `dataset`, such as (x, y), a frame or a list of clients. They are split as
    they say, or 75/25. A `Federation` is taken as it is. `epochs` such as `0,1,5` are the local
    epochs after which the client is tested; by default, `holdout_epochs` of the run. `number` is
    that of the first client, by default the next after the run's. `out` is the file of the
    personal model, or a folder for those of several clients; with `force`, files that exist are
    overwritten. `fedala.load(run, …).with_weights(file)` predicts with such a model. Give code of
    your own that the run was made with again: a `model` (a function, or its name such as
    `net.py:make`), a `loss`, and `imports` for methods.
    """
    folder = RunFolder.open(locate_folder(run))
    _check_code_is_named(folder, model, imports)
    import_given({"imports": imports})
    finished = find_run(folder, method, seed)
    check_method(finished.member.method)
    for name, given in (("model", model), ("loss", loss)):
        if getattr(finished.config, name) == "own" and given is None:
            raise UserError(
                f"{folder.path} was made in Python with its own {name}: onboard clients there, "
                f"with onboard(…, {name}=…)."
            )
    counts = _choose_epochs(finished.config, epochs)
    first = _choose_number(finished, number)
    federation = make_federation(finished, data, first)
    numbers = range(first, first + federation.held_out)
    targets = _choose_files(out, numbers, federation.client_names)
    for target in targets.values():
        check_overwriting(target, [data], force=force)
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
    transport = LocalTransport(setup, **cohort_options(finished.config.lanes, task))
    newcomers = Newcomers(setup, transport, EvaluationSchedule(setup.rounds, 1), counts)
    with use_device(task.device):
        arrivals = newcomers.arrive(
            [server], [finished.server_round(round + 1)], keeps_models=True, tests_received=True
        )
    clients = [
        _collect(arrival, position, task, federation.client_names)
        for arrival in arrivals
        for position, (_, client) in enumerate(arrival.lanes)
    ]
    clients.sort(key=lambda client: client.number)
    clients = [_write(client, targets.get(client.number), finished) for client in clients]
    metric = task.loss.metric
    notes = _explain(finished, federation)
    return Onboarding(finished.member.title, finished.seed, round, metric, clients, notes)


def _explain(finished: FinishedRun, federation: Federation) -> tuple[str, ...]:
    """Say aloud whose samples they are, if the run's data named their clients and these do not."""
    column, dataset = finished.config.clients_by, federation.dataset
    if column is None or dataset.clients is not None:
        return ()
    return (
        f"{printable(dataset.name, 100)} has no {printable(column, 100)}, which named the clients "
        "of the run, so it is one client.",
    )


def _check_code_is_named(folder: RunFolder, model: Any, imports: Any) -> None:
    """Refuse to execute code because a run folder names it: the user must name it, too."""
    config = folder.config()
    for option, named, given in (
        ("imports", config.imports, imports),
        ("model", config.model if is_reference(config.model) else None, model),
    ):
        if named and given is None:
            raise UserError(
                f"{folder.path} was made with code of its own, which is executed only if you name "
                f"it again: {name_option(option, printable(str(named), 200))}."
            )


def _choose_epochs(config: Config, epochs: str | int | Sequence[int] | None) -> tuple[int, ...]:
    if epochs is not None and not isinstance(epochs, str | int):
        epochs = ",".join(map(str, epochs))
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
    planned = replace(planned, normalization=figures) if figures else planned
    method = finished.member.method
    return extend_task(*build_task(planned), method.head, method.title)


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


def _choose_files(
    out: Path | str | None, numbers: Sequence[int], names: Sequence[str]
) -> dict[int, Path]:
    """Return the file of each client's model. Refuse one that cannot be made."""
    if out is None:
        return {}
    path = Path(out)
    if path.suffix == ".safetensors":
        if len(numbers) > 1:
            raise UserError(
                f"The data hold {len(numbers)} clients, and {path} is one file: name a folder."
            )
        targets = {numbers[0]: path}
    elif path.suffix and not path.is_dir():
        raise UserError(f"{path} must be a .safetensors file, or a folder.")
    else:
        targets = {
            number: path / f"client-{_file_stem(number, names)}.safetensors" for number in numbers
        }
    parent = path.absolute().parent if path.suffix == ".safetensors" else path
    if path.suffix == ".safetensors" and not parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}.")
    if parent.exists() and not parent.is_dir():
        raise UserError(f"{path} is a file: name a .safetensors file, or a folder.")
    return targets


def _file_stem(number: int, names: Sequence[str]) -> str:
    """Return a client's number, and its name if that can be part of a file's name."""
    name = re.sub(r"[^\w.-]+", "_", names[number])[:50] if names else ""
    return f"{number:05d}-{name}" if name else f"{number:05d}"


def _write(client: OnboardedClient, target: Path | None, finished: FinishedRun) -> OnboardedClient:
    """Write a client's model if it has a file, with what its use needs to know."""
    if target is None:
        return client
    fed, config = finished.folder.preprocessing(), finished.member.config
    about = {
        "run": finished.folder.path.name,
        "method": config.method,
        "seed": finished.seed,
        "client": client.name,
        "model": config.model,
    }
    metadata = fed.metadata(about) if fed else {}
    tensors = {name: value.contiguous() for name, value in client.model.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write_file(target, pack_tensors(tensors, {"format": "pt", **metadata}))
    except OSError as error:
        raise UserError(f"The model cannot be written to {target}: {error}.") from None
    return replace(client, file=target)


def _collect(arrival: Arrival, lane: int, task: Task, names: Sequence[str]) -> OnboardedClient:
    """Return one client's results."""
    client = arrival.lanes[lane][1]
    figures = {count: scores[lane].tolist() for count, scores in arrival.scores.items()}
    last = max(arrival.models)
    model = drop_transient(task, take(arrival.models[last], slice(lane, lane + 1)))
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
    )


def _share(total: float, samples: float) -> float:
    return total / samples if samples else float("nan")
