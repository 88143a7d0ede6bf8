"""FedPHP: Li, Zhan, Shao, Li, Song. FedPHP: Federated Personalization with Inherited Private
Models. ECML PKDD 2021."""

from dataclasses import dataclass

from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Task, interpolate
from fedala.lanes.features import find_last_cut
from fedala.methods.base import Method
from fedala.methods.teachers import TeacherObjective, mmd
from fedala.options import option


@dataclass(frozen=True)
class FedPHP(Method):
    """A client mixes its old model into the received one, more in later rounds, and stays near a
    teacher's features.

    `variant = "paper"` is how the authors of FedALA ran it: the mix is the local model w, and the
    teacher is the received model. In the publication ("historical"), w starts from the received
    model, and the mix h of all old w is teacher and personal model.
    """

    name = "fedphp"
    title = "FedPHP"
    summary = "the global model, with more and more of the client's own mixed in"
    kind = "blended"
    schedule_depends_on_rounds = True
    requires_features = True
    lane_numbers = frozenset({"mu", "lam"})

    mu: float = option(
        0.9,
        "μ: share of the old model after the last round; after round t of T it is μ·t/T",
        least=0,
        most=1,
    )
    lam: float = option(
        0.01,
        "λ: weight of the distance (MMD) between the model's and the teacher's features",
        least=0,
        most=1,
    )
    variant: str = option(
        "paper",
        "as the authors of FedALA ran it, or with the publication's historical model",
        choices=("paper", "historical"),
    )

    def init_client(self, task: Task, initial: Params) -> State:
        return {"personal" if self.variant == "historical" else "local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        if self.variant == "historical":
            return received.model, state
        part = (cohort.round - 1) / cohort.rounds
        return self._mix(received.model, state["local"], part), state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        cut = find_last_cut(cohort.task, initialized, self.title)
        teacher = state.get("personal", received.model)
        local = cohort.fit(
            initialized,
            objective=TeacherObjective(cut, stay_near),
            fixed={"teachers": {"teacher": teacher}, "numbers": {"lam": cohort.constant(self.lam)}},
        )
        if self.variant == "historical":
            personal = self._mix(local, state["personal"], cohort.round / cohort.rounds)
            return Message(local), {"personal": personal}
        return Message(local), {"local": local}

    def _mix(self, new: Params, old: Params, part: float) -> Params:
        """Return (1 − μ_t)·new + μ_t·old with μ_t = μ·part; counters are the new ones.

        `part` is the share of the rounds that have been trained.
        """
        return {**new, **interpolate(new, old, self.mu * part)}


def stay_near(loss: Tensor, features: Tensor, teacher: Tensor, lam: Tensor) -> Tensor:
    """Return (1 − λ)·loss + λ·MMD(features under w, under the teacher)."""
    return (1 - lam) * loss + lam * mmd(features, teacher)
