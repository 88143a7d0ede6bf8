"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar. Personalized Federated Learning with Theoretical
Guarantees: A Model-Agnostic Meta-Learning Approach. NeurIPS 2020. Its first-order variant,
Per-FedAvg (FO)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedala.lanes import Cohort, Gradients, Message, Params, State, Task, descend, try_step
from fedala.lanes.trees import first_leaf, tree_map
from fedala.methods.base import Method
from fedala.options import option


@dataclass(frozen=True)
class PerFedAvg(Method):
    """The global model is trained to be good after one step on a client's data."""

    name = "per-fedavg"
    title = "Per-FedAvg"
    summary = "a global model that one local step makes personal (first-order MAML)"
    kind = "fine-tuned"
    lane_numbers = frozenset({"alpha", "beta"})

    alpha: float | None = option(
        None, "α: learning rate of adapting; by default, the run's learning rate", least=0
    )
    beta: float | None = option(
        None, "β: learning rate of the meta-step; by default, the run's learning rate", least=0
    )

    def init_client(self, task: Task, initial: Params) -> State:
        return {"personal": initial}

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        return self.adapt(cohort, initialized)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(
            initialized,
            gradients=meta_gradients,
            fixed={"alpha": self._alpha(cohort)},
            lr=self.beta,
            batch_size=2 * cohort.task.batch_size,
        )
        # The adapted model is the personal one, for the rounds without this client.
        return Message(trained), {"personal": self.adapt(cohort, trained)}

    def adapt(self, cohort: Cohort, model: Params) -> Params:
        """Take one plain step on the client's first B samples; its running statistics stay."""
        task = cohort.task
        first = [task.parts["train"][client][: task.batch_size] for client in cohort.clients]
        stepped = cohort.train(
            adapting_step,
            model,
            {"alpha": self._alpha(cohort)},
            rows=first,
            epochs=1,
            purpose="adapting",
            report_loss=False,
        )
        return {**model, **{name: stepped[name] for name in task.trainable}}

    def _alpha(self, cohort: Cohort) -> Tensor:
        return cohort.lr if self.alpha is None else cohort.constant(self.alpha)


def adapting_step(task: Task, model: Params, rates: State, x: Any, y: Any) -> Tensor:
    """w ← w − α∇f(w)."""
    losses, gradients = task.gradients(model, x, y)
    descend(model, gradients, rates["alpha"])
    return losses


def meta_gradients(
    task: Task, model: Params, rates: State, x: Any, y: Any
) -> tuple[Tensor, Gradients]:
    """w' = w − α∇f(w; first half of the batch); the gradient is ∇f(w'; second half)."""
    targets = first_leaf(y)
    assert targets is not None
    half = targets.shape[1] // 2
    first, second = slice(0, max(half, 1)), slice(half, None)  # a single sample is both halves
    # The running statistics of w stay as they are at the first half.
    buffers = {name: value.clone() for name, value in model.items() if name not in task.trainable}
    _, gradients = task.gradients({**model, **buffers}, *_take_samples((x, y), first))
    with try_step(model, gradients, rates["alpha"]) as adapted:
        return task.gradients({**model, **adapted}, *_take_samples((x, y), second))


def _take_samples(batch: Any, samples: slice) -> Any:
    return tree_map(lambda t: t[:, samples], batch)
