"""FedBABU: Oh, Kim, Yun. FedBABU: Toward Enhanced Representation for Federated Image
Classification. ICLR 2022."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.layer_units import Layers
from fedala.methods.partly_shared import PartlyShared
from fedala.options import option


@dataclass(frozen=True)
class FedBABU(PartlyShared):
    """The body is trained and averaged under a head that stays as it was drawn.

    A client is tested with the model that it fine-tunes for itself. Nobody else sees that one.
    """

    name = "fedbabu"
    title = "FedBABU"
    summary = "only the body is trained together; a client fine-tunes it and the head to be tested"
    kind = "fine-tuned"
    requires_body = True

    epochs: int = option(5, "τ_f: epochs of fine-tuning before a test", least=0)
    part: str = option("whole", "what is fine-tuned", choices=("whole", "head", "body"))

    def own_part(self, model: nn.Module, layers: Layers) -> Collection[str]:
        return layers[0]

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial, "personal": initial}

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        return self.tune(cohort, initialized)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        body = self.shared_part(cohort.task, initialized)
        trained = cohort.fit(initialized, names=body.keys())
        # A client that is tested while it is absent needs its fine-tuned model then.
        personal = self.tune(cohort, trained) if cohort.tests_absent else trained
        upload = Message(self.shared_part(cohort.task, trained))
        return upload, {"local": trained, "personal": personal}

    def trained_model(
        self, cohort: Cohort, received: Message, upload: Message, state: State
    ) -> Params:
        return state["personal"] if cohort.tests_absent else self.tune(cohort, state["local"])

    def tune(self, cohort: Cohort, model: Params) -> Params:
        """Return the model after fine-tuning, by a fresh optimiser."""
        body = self.shared_part(cohort.task, model).keys()
        parts = {"whole": None, "body": body, "head": model.keys() - body}
        return replace(cohort, kept_slots=None).fit(
            model,
            names=parts[self.part],
            epochs=self.epochs,
            purpose="tuning",
            report_loss=False,
        )

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        return {"local": [name for name in task.trainable if name not in task.layers[0]]}
