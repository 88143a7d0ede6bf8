"""Check that a plan fits into memory and onto the disk."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedala.errors import UserError, byte_size
from fedala.io.untrusted import free_memory
from fedala.options import name_option
from fedala.runs.folder import nearest_existing_parent
from fedala.runs.plan import Plan


def choose_best_models(plan: Plan, out: Path | None, before: bool | None = None) -> Plan:
    """Decide whether the best models are saved, for a config that leaves it open.

    They are, along with the last ones, if they fit into memory and onto the disk. A run that is
    resumed does as it did `before`.
    """
    config = plan.config
    with_best = replace(plan, config=replace(config, save_best=True))
    if before is not None:
        return with_best if before else replace(plan, config=replace(config, save_best=False))
    if config.save_models and plan.fits_best_models:
        with suppress(UserError):
            check_room(with_best, out)
            return with_best
    return replace(plan, config=replace(config, save_best=False))


def check_room(plan: Plan, out: Path | None, present: int = 0) -> None:
    """Refuse a run whose models and checkpoints do not fit on the disk, or in memory without `out`.

    `present`: the bytes of them that are on the disk already.
    """
    config, clients = plan.config, plan.local_clients
    personal = clients * sum(method.has_personal_models for method in plan.methods)
    models = personal * (config.save_models + bool(config.save_best))
    needed, what = models * plan.model_bytes, f"Keeping {models} models takes"
    without = name_option("save_models", False)
    advice = f"use {without}"
    if config.save_best:
        only_last = name_option("save_best", False)
        advice = f"use {only_last} to keep only the models of the last evaluation, or {without}"
    if out is None:
        room, where = free_memory() // 2, "memory"
    else:
        room, where = shutil.disk_usage(nearest_existing_parent(out)).free, "disk"
        if config.checkpoint_every != 0:
            # While a third checkpoint is written, two are kept. They share the files of clients
            # that took no part between them.
            changed = min(1.0, config.join_ratio * (config.checkpoint_every or 10))
            states = [clients * size for size in plan.state_bytes.values()]
            largest = clients * max(plan.count_state_bytes(group) for group in plan.groups)
            needed += int(sum(states) + 2 * changed * largest)
            if personal and config.save_best:
                needed += 2 * plan.count_best_models() * plan.model_bytes
            what = f"Keeping {models} models and the state of {clients} clients takes"
            never = name_option("checkpoint_every", 0)
            advice += f", or {never} to do without checkpoints"
    needed = max(0, needed - present)
    if needed > room:
        more = "another " if present else ""
        raise UserError(
            f"{what} {more}{byte_size(needed)} of {where}, and there is room for "
            f"{byte_size(room)}: {advice}."
        )
