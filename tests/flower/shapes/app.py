"""Two apps that send a part of their model.

`body` sends all but its head, which each client keeps in its context. `adapter` fine-tunes a
language model and sends the LoRA adapter, under the names that PEFT gives it. Both read batches
that are dicts.
"""

import peft
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fedala.flower import ala_mod, order_mods


def make_loader(**columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return DataLoader(rows, batch_size=8)


def draw(context: Context) -> torch.Generator:
    return torch.Generator().manual_seed(int(context.node_config["partition-id"]))


def train_model(model: nn.Module, batches, find_loss) -> int:
    model.eval()  # no dropout: results can be compared
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        find_loss(model, batch).backward()
        optimizer.step()
    return len(batches.dataset)


def reply(message: Message, state, count: int) -> Message:
    content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(content), reply_to=message)


# --- a body, with the head in the context ---


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x))


def load_points(context: Context):
    """Load points whose labels depend on the client."""
    x = torch.randn(64, 4, generator=draw(context))
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return make_loader(img=x, label=(y + int(context.node_config["partition-id"])) % 4)


def load_net(context: Context) -> Net:
    model = Net()
    if "head" in context.state:
        model.head.load_state_dict(context.state["head"].to_torch_state_dict())
    return model


body = ClientApp(
    mods=order_mods(ala_mod(lambda context: (load_net(context), load_points(context))))
)


@body.train()
def train_body(message: Message, context: Context) -> Message:
    model = load_net(context)
    model.body.load_state_dict(message.content["arrays"].to_torch_state_dict())
    count = train_model(
        model, load_points(context), lambda net, b: F.cross_entropy(net(b["img"]), b["label"])
    )
    context.state["head"] = ArrayRecord(model.head.state_dict())
    return reply(message, model.body.state_dict(), count)


# --- an adapter ---


def make_language_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    lora = peft.LoraConfig(r=2, lora_dropout=0.0, task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(base, lora)


def load_sentences(context: Context):
    """Load sequences that count upwards, with a step of the client's own."""
    start = torch.randint(16, (32, 1), generator=draw(context))
    step = 1 + int(context.node_config["partition-id"])
    tokens = (start + step * torch.arange(6)) % 16
    return make_loader(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)


adapter = ClientApp(
    mods=order_mods(
        ala_mod(lambda context: (make_language_model(), load_sentences(context)), eta=100.0)
    )
)


@adapter.train()
def train_adapter(message: Message, context: Context) -> Message:
    model = make_language_model()
    peft.set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    count = train_model(model, load_sentences(context), lambda net, batch: net(**batch).loss)
    return reply(message, peft.get_peft_model_state_dict(model), count)


START = {
    "body": lambda: Net().body.state_dict(),
    "adapter": lambda: peft.get_peft_model_state_dict(make_language_model()),
}
server = ServerApp()


def run(grid: Grid, shape: str, rounds: int) -> dict[str, torch.Tensor]:
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(START[shape]()), num_rounds=rounds)
    return dict(result.arrays.to_torch_state_dict())


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    save_file(run(grid, str(config["shape"]), int(config["rounds"])), str(config["out"]))
