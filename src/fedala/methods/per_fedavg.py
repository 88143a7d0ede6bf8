"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar. Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach. NeurIPS 2020. Its first-order variant, Per-FedAvg (FO)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedala.lanes.cohort import SGD, Cohort, Params, Task, descend
from fedala.lanes.trees import leaves, tree_map
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class MetaStep:
    """w' = w − α∇f(w; first half of the batch); w ← w − β∇f(w'; second half)."""

    alpha: float
    beta: float

    def __call__(self, task: Task, state: Params, fixed: Any, x: Any, y: Any) -> Tensor:
        _, targets = next(leaves(y))
        half = targets.shape[1] // 2
        first, second = slice(0, max(half, 1)), slice(half, None)  # a single sample is both halves
        # A copy with buffers and all: w' is tried out, and the running statistics of trying it out go with it.
        adapted = tree_map(lambda value: value.clone(), state)
        _, gradients = task.gradients(adapted, *tree_map(lambda t: t[:, first], (x, y)))
        descend(adapted, gradients, self.alpha)
        at_adapted = {**state, **{name: adapted[name] for name in gradients}}
        losses, gradients = task.gradients(at_adapted, *tree_map(lambda t: t[:, second], (x, y)))
        descend(state, gradients, self.beta)
        return losses


@dataclass(frozen=True)
class PerFedAvg(Method):
    """The global model is trained to be good after one step of gradient descent on a client's data, and evaluated after it."""

    name = "per-fedavg"
    title = "Per-FedAvg"
    summary = "a global model that one local step makes personal (first-order MAML)"

    alpha: float | None = option(
        None, "α: learning rate of adapting; the run's learning rate, if not set", least=0
    )
    beta: float | None = option(
        None, "β: learning rate of the meta-step; the run's learning rate, if not set", least=0
    )

    def fresh(self, task: Task, start: Params) -> State:
        return {"personal": start}

    def evaluated(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> Params:
        return self.adapted(cohort, initialized)

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        step = MetaStep(
            self._alpha(cohort.task), cohort.task.lr if self.beta is None else self.beta
        )
        trained = cohort.train(step, initialized, batch_size=2 * cohort.task.batch_size)
        # Personal is what adapting makes of it; kept for the rounds that the client is not part of.
        return trained, {"personal": self.adapted(cohort, trained)}

    def left(self, upload: Params, state: State) -> Params:
        personal: Params = state["personal"]
        return personal

    def adapted(self, cohort: Cohort, model: Params) -> Params:
        """The model after one step on the client's first B training samples; its running statistics stay, as in the meta-step."""
        task = cohort.task
        first = [task.parts["train"][client][: task.batch_size] for client in cohort.clients]
        step = SGD(self._alpha(task), task.trainable)
        stepped = cohort.train(step, model, rows=first, epochs=1, purpose="adapting", note=False)
        return {**model, **{name: stepped[name] for name in task.trainable}}

    def _alpha(self, task: Task) -> float:
        return task.lr if self.alpha is None else self.alpha
