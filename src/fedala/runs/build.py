"""Build the task and the simulations of a plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedala.data.preprocessing import Preprocessing
from fedala.lanes.augmentation import parse_augmentation
from fedala.lanes.parameters import model_state
from fedala.lanes.randomness import torch_seed
from fedala.lanes.task import Task
from fedala.lanes.trees import Params
from fedala.methods import Method
from fedala.runs.holdout import parse_epochs
from fedala.runs.plan import Plan
from fedala.simulation import Simulation


def build_task(plan: Plan) -> tuple[Task, Callable[[int], Params]]:
    """Return the task, and a function that makes the initial model Θ⁰ of a seed."""
    config, federation, recipe = plan.config, plan.federation, plan.config.recipe()
    task = Task(
        plan.make_skeleton(),
        federation.dataset.x,
        _to_precision(federation.dataset.y, config.precision),
        federation.train,
        federation.test,
        federation.validation,
        loss=plan.loss,
        batch_size=config.batch_size,
        lr=recipe.lr,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        keeps_optimizer=config.keep_optimizer,
        epochs=config.local_epochs,
        local_steps=config.local_steps,
        shuffle=config.shuffle,
        device=plan.device,
        precision=config.precision,
        normalization=plan.normalization,
        augmentation=parse_augmentation(config.augment),
        feature_memory=_to_bytes(config.feature_memory),
    )

    def start(seed: int) -> Params:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "initial model"))
            state = model_state(plan.make_model())
        return {
            name: value.to(plan.device, task.dtype if value.is_floating_point() else value.dtype)
            for name, value in state.items()
        }

    return task, start


def build_preprocessing(plan: Plan) -> Preprocessing | None:
    """Return what turns raw samples into the input of the models that are saved, if any are.

    A server whose nodes read data of their own does not know what these are.
    """
    config = plan.config
    is_unknown = config.model == "own" and not plan.has_local_clients
    if is_unknown or not (config.save_models or config.save_best):
        return None
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    dataset = plan.federation.dataset
    return Preprocessing.of(dataset, plan.normalization, dtype, resize=config.resize)


def build_simulation(plan: Plan, method: Method, **options: Any) -> Simulation:
    """Build one method's simulation, ready for its first round."""
    config = plan.config
    task, start = build_task(plan)
    if options.get("transport") is None:  # the clients are on this machine
        options |= local_options(plan, task)
    return Simulation(
        method,
        task,
        start,
        seeds=range(config.seed, config.seed + config.seeds),
        rounds=int(config.rounds or 1),
        join_ratio=config.join_ratio,
        eval_every=config.eval_every,
        eval_clients=config.eval_clients,
        pick_by=config.pick_by,
        record_weights=int(config.record_weights or 0),
        evaluate=config.evaluated_models,
        metrics_every=config.metrics_every,
        on_divergence=config.on_divergence,
        held_out=plan.federation.held_out,
        holdout_epochs=parse_epochs(config.holdout_epochs),
        holdout_every=config.holdout_every,
        **options,
    )


def local_options(plan: Plan, task: Task) -> dict[str, Any]:
    """Return how the clients of this machine share it: the options of `LocalTransport`."""
    memory = _to_bytes(plan.config.client_memory)
    return {**cohort_options(plan.config.lanes, task), "client_memory": memory}


def cohort_options(lanes: str, task: Task) -> dict[str, Any]:
    """Return how many clients form a cohort, and how many cohorts run at a time."""
    if lanes != "auto":
        return {"lanes": None if lanes == "all" else int(lanes), "threads": 1}
    # A cohort has a thread to itself: threads within an operation have little to share, and wait
    # for each other far longer than they work if other programs use the machine.
    threads = torch.get_num_threads() if task.device.type == "cpu" else 1
    return {"lanes": task.backend.choose_lanes(task), "threads": threads}


def _to_precision(y: Tensor, precision: str) -> Tensor:
    """Return float targets in the precision of the outputs, and labels as they are."""
    return y.double() if y.is_floating_point() and precision == "float64" else y


def _to_bytes(gibibytes: float | None) -> int | None:
    return None if gibibytes is None else int(gibibytes * 2**30)
