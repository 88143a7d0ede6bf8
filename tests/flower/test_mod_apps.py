"""ALA in apps of the shapes of Flower's own examples: their batches, arrays and names.

Each app runs two rounds. What its training then receives equals what `fedala.ALA` makes of the same
models and data by hand, in arrays of the same names, types, shapes and order as without the mod.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import InProcessGrid  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.client import NumPyClient  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.common import FitIns, ndarrays_to_parameters  # noqa: E402
from flwr.compat.common import recorddict_compat as compat  # noqa: E402

from fedala import ALA, UserError  # noqa: E402
from fedala.flower import ala_mod  # noqa: E402
from fedala.flower.model_arrays import copy_with_arrays  # noqa: E402


@pytest.fixture(autouse=True)
def _sender(tmp_path):
    InProcessGrid(ClientApp(), 0, tmp_path)


def make_context(folder):
    return Context(1, 7, {"partition-id": 0, "state-dir": str(folder)}, RecordDict(), {})


def change(array):
    """Train, in a way that a test can repeat. Counters stay as they are."""
    return (
        np.asarray(array * 0.9 + 0.05, array.dtype)
        if np.issubdtype(array.dtype, np.floating)
        else array
    )


def run_app(folder, setup, sent, context=None, **options):
    """Run an app of today for one round per model; return what its training received."""
    seen = []
    app = ClientApp(mods=[ala_mod(setup, **options)])

    @app.train()
    def train(message, context):
        arrays = message.content["arrays"]
        seen.append(arrays)
        trained = {name: torch.from_numpy(change(a.numpy())) for name, a in arrays.items()}
        return Message(RecordDict({"arrays": ArrayRecord(trained)}), reply_to=message)

    context = context or make_context(folder)
    for state in sent:
        content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({})})
        app(Message(content, dst_node_id=7, message_type="train"), context)
    return seen


def run_legacy_app(folder, setup, sent, **options):
    """Run a `NumPyClient`; return the lists of arrays that its `fit` received."""
    seen = []

    class Client(NumPyClient):
        def fit(self, parameters, config):
            seen.append([array.copy() for array in parameters])
            return [change(array) for array in parameters], 1, {}

    app = ClientApp(
        client_fn=lambda context: Client().to_client(), mods=[ala_mod(setup, **options)]
    )
    for arrays in sent:
        content = compat.fitins_to_recorddict(FitIns(ndarrays_to_parameters(arrays), {}), True)
        app(Message(content, dst_node_id=7, message_type="train"), make_context(folder))
    return seen


def fill(model, names, arrays):
    """Copy the model with these arrays in it."""
    model = copy.deepcopy(model)
    state = model.state_dict()
    with torch.no_grad():
        for name, array in zip(names, arrays, strict=True):
            state[name].copy_(torch.as_tensor(array))
    return model


def blend_by_hand(model, names, sent, seen, data, loss=F.cross_entropy, layers=1):
    """Return the second round's blend of what was sent and of what the first round trained."""
    ala = ALA(layers=layers, max_epochs=3)
    first, second = (fill(model, names, arrays) for arrays in sent)
    ala.initialize(copy.deepcopy(first), first, data, loss)
    local = fill(model, names, [change(np.asarray(array)) for array in seen])
    ala.initialize(local, second, data, loss)
    assert any((weights < 1).any() for weights in ala.weights.values())
    blended = dict(local.state_dict())
    return [blended[name] for name in names], set(ala.weights)


def assert_received(received, sent, expected, names, governed, atol=1e-6):
    """Check the arrays of the second round: those that are governed are blended, others as sent."""
    assert governed < set(names)
    for array, original, value, name in zip(received, sent, expected, names, strict=True):
        original = np.asarray(original)
        assert (array.dtype, array.shape) == (original.dtype, original.shape)
        if name in governed:
            assert not np.array_equal(array, original)
            np.testing.assert_allclose(array, value.detach().float().numpy(), rtol=0, atol=atol)
        else:
            np.testing.assert_array_equal(array, original)


def make_states(make, **kind):
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        states.append({name: value.to(**kind) for name, value in make().state_dict().items()})
    return states


def to_arrays(states):
    return [[value.numpy() for value in state.values()] for state in states]


def check_app(folder, setup, sent, expected_names, data, loss=F.cross_entropy, layers=1, **options):
    """Check an app whose arrays have these names in the model; `layers` is for ALA by hand."""
    seen = run_app(folder, setup, sent, max_epochs=3, **options)
    assert [list(arrays) for arrays in seen] == [list(state) for state in sent]
    model = setup(make_context(folder))[0]
    received, sent = [arrays.to_numpy_ndarrays() for arrays in seen], to_arrays(sent)
    expected, governed = blend_by_hand(model, expected_names, sent, received[0], data, loss, layers)
    assert_received(received[1], sent[1], expected, expected_names, governed)
    return governed


class Net(nn.Module):
    """A body with normalisation and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.fc1, self.fc2 = nn.Linear(12, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.fc2(self.fc1(self.norm(self.conv(x)).relu().flatten(1)).relu())


IMAGES = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(20) % 4
LOADER = DataLoader(
    [{"img": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)],
    batch_size=8,
    shuffle=True,
)
NAMES = list(Net().state_dict())


def setup(context):
    return Net(), LOADER


def test_a_loader_of_dicts(tmp_path):
    governed = check_app(tmp_path, setup, make_states(Net), NAMES, (IMAGES, LABELS))
    assert governed == {"fc2.weight", "fc2.bias"}


def test_a_split_for_other_batches(tmp_path):
    rows = [{"image": image, "digit": y} for image, y in zip(IMAGES, LABELS, strict=True)]
    check_app(
        tmp_path,
        lambda context: (Net(), DataLoader(rows)),
        make_states(Net),
        NAMES,
        (IMAGES, LABELS),
        split=lambda batch: (batch["image"], batch["digit"]),
    )


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (Net(), "setup must return a model and the client's training data"),
        ((Net(), LOADER, None, None), "it returns 4 things"),
        ((Net, LOADER), "an nn.Module first, and it returns type"),
    ],
    ids=["model", "four", "class"],
)
def test_a_setup_that_returns_something_else_is_refused(tmp_path, returned, sentence):
    with pytest.raises(UserError, match=sentence):
        run_app(tmp_path, lambda context: returned, make_states(Net))


@pytest.mark.parametrize("hook", ["split", "names"])
def test_hooks_of_another_kind_are_refused_before_any_message(hook):
    with pytest.raises(UserError, match=f"{hook} must be a function"):
        ala_mod(setup, **{hook: 3})


# --- a part of the model --------------------------------------------------------------------------


def take_part(states, *prefixes):
    return [{n: v for n, v in state.items() if n.startswith(prefixes)} for state in states]


def make_net_with_head():
    """Make the model as the client has it: with its own head."""
    torch.manual_seed(9)
    return Net()


def test_an_app_that_sends_its_body_alone(tmp_path):
    governed = check_app(
        tmp_path,
        lambda context: (make_net_with_head(), LOADER),
        take_part(make_states(Net), "conv", "norm", "fc1"),
        [name for name in NAMES if not name.startswith("fc2")],
        (IMAGES, LABELS),
        layers=["fc1"],
    )
    assert governed == {"fc1.weight", "fc1.bias"}


def test_an_app_that_receives_a_head_but_uses_its_own(tmp_path):
    """As in advanced-pytorch: the head is in the context, and `names` leaves the sent one alone."""
    head = ArrayRecord(make_net_with_head().fc2.state_dict())

    def setup_with_head(context):
        model = Net()
        model.fc2.load_state_dict(context.state["head"].to_torch_state_dict())
        return model, LOADER

    def leave_head(name):
        return None if name.startswith("fc2.") else name

    whole, context = make_states(Net), make_context(tmp_path)
    context.state["head"] = head
    seen = run_app(tmp_path, setup_with_head, whole, context, names=leave_head, max_epochs=3)
    names = [name for name in NAMES if not name.startswith("fc2")]
    part = to_arrays(take_part(whole, "conv", "norm", "fc1"))
    received = [[arrays[name].numpy() for name in names] for arrays in seen]
    model = setup_with_head(context)[0]
    expected, governed = blend_by_hand(
        model, names, part, received[0], (IMAGES, LABELS), layers=["fc1"]
    )
    assert_received(received[1], part[1], expected, names, governed)
    assert list(seen[1]) == NAMES
    np.testing.assert_array_equal(seen[1]["fc2.bias"].numpy(), whole[1]["fc2.bias"].numpy())


def test_the_state_dict_of_a_sub_module_is_recognised(tmp_path):
    """As in flowertune-vit: only the head travels, under its own names."""

    def setup_frozen(context):
        model = make_net_with_head().requires_grad_(False)
        model.fc2.requires_grad_(True)
        return model, LOADER

    heads = make_states(lambda: nn.Linear(6, 4))
    seen = run_app(tmp_path, setup_frozen, heads, max_epochs=3)
    assert list(seen[1]) == ["weight", "bias"]
    names, sent = ["fc2.weight", "fc2.bias"], to_arrays(heads)
    received = [arrays.to_numpy_ndarrays() for arrays in seen]
    expected, governed = blend_by_hand(
        setup_frozen(None)[0], names, sent, received[0], (IMAGES, LABELS)
    )
    assert governed == set(names)
    for array, value in zip(received[1], expected, strict=True):
        np.testing.assert_allclose(array, value.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("prefix", "options", "sentence"),
    [
        ("norm.running", {}, "nothing that ALA could blend"),
        ("conv", {"layers": 2}, "between 0 and 1, the number of layers that learn and are shared"),
        ("conv", {"layers": ["fc2"]}, r"takes fc2\.weight, fc2\.bias, which is not"),
        ("fc", {"names": lambda name: f"net.{name}"}, r"fc1\.weight into net\.fc1\.weight"),
        ("fc", {"names": lambda name: "fc1.bias"}, "two arrays into the same"),
        ("fc", {"names": lambda name: None}, "nothing that ALA could blend"),
    ],
    ids=["buffers", "too-many", "pattern", "unknown-name", "same-name", "no-name"],
)
def test_what_cannot_be_blended_is_refused(tmp_path, prefix, options, sentence):
    with pytest.raises(UserError, match=sentence):
        run_app(tmp_path, setup, take_part(make_states(Net), prefix), **options)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["function", "dict"])
def test_names_of_the_apps_own(tmp_path, kind):
    sent = [{f"net.{name}": value for name, value in state.items()} for state in make_states(Net)]
    names = {f"net.{name}": name for name in NAMES}
    hook = names if kind == "dict" else lambda name: name.removeprefix("net.")
    check_app(tmp_path, setup, sent, NAMES, (IMAGES, LABELS), names=hook)


def test_unknown_names_are_refused_with_a_hint(tmp_path):
    sent = [{"other": torch.ones(3)}]
    with pytest.raises(UserError, match=r"does not have other.*names="):
        run_app(tmp_path, setup, sent)


PARAMETERS = [name for name, _ in Net().named_parameters()]


def make_split_net():
    """Make a model of a body and a head."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU())
    return nn.Sequential(body, nn.Linear(5, 4))


@pytest.mark.parametrize("kind", ["state-dict", "parameters", "body"])
def test_legacy_arrays_without_names(tmp_path, kind):
    make, layers = Net, 1
    names = NAMES if kind == "state-dict" else PARAMETERS
    if kind == "body":
        make, layers = make_split_net, [r"0\.3"]
        names = [name for name in make().state_dict() if name.startswith("0.")]
    torch.manual_seed(3)
    model = make()
    sent = [[state[name].numpy() for name in names] for state in make_states(make)]
    seen = run_legacy_app(tmp_path, lambda context: (model, LOADER), sent, max_epochs=3)
    expected, governed = blend_by_hand(model, names, sent, seen[0], (IMAGES, LABELS), layers=layers)
    assert_received(seen[1], sent[1], expected, names, governed)


def test_legacy_arrays_that_could_be_several_parts_are_refused(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    arrays = [np.zeros((16, 16), np.float32), np.zeros(16, np.float32)]
    with pytest.raises(UserError, match=r"not clear which parameters the 2 arrays .*names="):
        run_legacy_app(tmp_path, lambda context: (model, LOADER), [arrays])
    seen = run_legacy_app(
        tmp_path, lambda context: (model, LOADER), [arrays], names={"0": "2.weight", "1": "2.bias"}
    )
    assert len(seen[0]) == 2


# --- types, tied and frozen parameters ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_models_of_another_precision_than_the_arrays(tmp_path, dtype):
    """NumPy has no bfloat16, so an app sends such a model as float32."""
    governed = check_app(
        tmp_path,
        lambda context: (Net().to(dtype), LOADER),
        make_states(Net),
        NAMES,
        (IMAGES, LABELS),
    )
    assert governed == {"fc2.weight", "fc2.bias"}


def test_arrays_of_half_precision(tmp_path):
    sent = make_states(Net, dtype=torch.float16)
    seen = run_app(tmp_path, setup, sent, max_epochs=3)
    received, sent = [arrays.to_numpy_ndarrays() for arrays in seen], to_arrays(sent)
    expected, governed = blend_by_hand(Net(), NAMES, sent, received[0], (IMAGES, LABELS))
    assert_received(received[1], sent[1], expected, NAMES, governed, atol=1e-3)


class Tied(nn.Module):
    """A layer and its transpose share a weight, which has two names in the state dict."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x.flatten(1)).relu())[:, :4]


def test_tied_weights(tmp_path):
    names = ["encode.weight", "encode.bias", "decode.weight"]
    seen = run_app(tmp_path, lambda context: (Tied(), LOADER), make_states(Tied), max_epochs=3)
    assert list(seen[1]) == names
    one, _, other = seen[1].to_numpy_ndarrays()
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, make_states(Tied)[1]["encode.weight"])


def test_frozen_parameters_are_not_blended(tmp_path):
    model = Net()
    model.fc2.requires_grad_(False)
    governed = check_app(
        tmp_path,
        lambda context: (model, LOADER),
        make_states(Net),
        NAMES,
        (IMAGES, LABELS),
    )
    assert governed == {"fc1.weight", "fc1.bias"}


def test_a_frozen_base_that_is_not_sent_is_not_copied():
    model = Net().requires_grad_(False)
    model.fc2.requires_grad_(True)
    names = {"a": "fc2.bias", "b": "norm.weight"}
    arrays = {"a": torch.ones(4), "b": torch.full((3,), 7.0)}
    filled = copy_with_arrays(model, arrays, names, "the test")
    assert filled.conv.weight is model.conv.weight
    assert filled.fc2.weight is not model.fc2.weight
    assert (filled.fc2.bias == 1).all()
    assert (filled.norm.weight == 7).all()
    assert (model.norm.weight == 1).all()


def test_a_frozen_tied_weight_that_is_sent_is_copied():
    model = Tied().requires_grad_(False)
    before = model.encode.weight.clone()
    arrays = {"decode.weight": torch.zeros(16, 16)}
    filled = copy_with_arrays(model, arrays, {name: name for name in arrays}, "the test")
    assert (filled.encode.weight == 0).all()
    assert torch.equal(model.encode.weight, before)


# --- models of Hugging Face -----------------------------------------------------------------------

TOKENS = torch.randint(3, 20, (12, 5), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(5) < torch.arange(12).view(-1, 1) % 4 + 2).long()


def make_token_loader(**columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return DataLoader(rows, batch_size=4, shuffle=True)


def test_a_classifier_of_transformers(tmp_path):
    """As in quickstart-huggingface: batches go into the model as they are."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        num_labels=2,
    )

    def make():
        return transformers.BertForSequenceClassification(config)

    y = torch.arange(12) % 2
    loader = make_token_loader(input_ids=TOKENS, attention_mask=MASK, labels=y)
    governed = check_app(
        tmp_path,
        lambda context: (make(), loader),
        make_states(make),
        list(make().state_dict()),
        ({"input_ids": TOKENS, "attention_mask": MASK}, y),
        lambda output, y: F.cross_entropy(output.logits, y),
    )
    assert governed == {"classifier.weight", "classifier.bias"}


def test_an_adapter_of_a_language_model(tmp_path):
    """As in flowertune-llm: a base in bfloat16 and a LoRA adapter under the names of PEFT."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
    )
    torch.manual_seed(5)
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)

    def make():
        lora = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(copy.deepcopy(base), lora)

    sent = []
    for seed in range(2):
        torch.manual_seed(seed)
        sent.append(peft.get_peft_model_state_dict(make()))
    labels = TOKENS.masked_fill(MASK == 0, -100)
    loader = make_token_loader(input_ids=TOKENS, attention_mask=MASK, labels=labels)
    names = [
        name.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default")
        for name in sent[0]
    ]
    governed = check_app(
        tmp_path,
        lambda context: (make(), loader),
        sent,
        names,
        ({"input_ids": TOKENS, "attention_mask": MASK, "labels": labels}, labels),
        lambda output, y: output.loss,
    )
    assert all(".layers.1." in name and "lora" in name for name in governed)
