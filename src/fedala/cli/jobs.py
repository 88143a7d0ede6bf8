"""`fedala run --jobs`: methods in several processes. This is also the program of each of them."""

import json
import sys

from fedala.cli.memory import keep_freed_memory
from fedala.cli.output import say
from fedala.options import use_flags
from fedala.runs.job_process import carry_out_job
from fedala.runs.jobs import Jobs
from fedala.runs.plan import Plan
from fedala.runs.processes import Parent


def choose_jobs(count: int, plan: Plan) -> Jobs | None:
    """Return the processes that carry out a plan; None if this one does it."""
    if count > 1 and len(plan.groups) == 1:
        say("All of this runs side by side in one process, so --jobs has no effect.")
    return Jobs(count) if min(count, len(plan.groups)) > 1 else None


def main() -> None:
    """Carry out one group of a run. The order is the first line of stdin."""
    keep_freed_memory()
    order = json.loads(sys.stdin.readline())
    with use_flags():
        raise SystemExit(carry_out_job(order, Parent()))


if __name__ == "__main__":
    main()
