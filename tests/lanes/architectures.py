"""Small models of many kinds, each with samples: what users bring."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

CLASSES = 3


def points(count: int) -> Tensor:
    return torch.randn(count, 4)


def images(count: int) -> Tensor:
    return torch.randn(count, 1, 6, 6)


def series(count: int) -> Tensor:
    return torch.randn(count, 4, 3)


def texts(count: int) -> Tensor:
    tokens = torch.randint(1, 9, (count, 5))
    tokens[::2, 3:] = 0  # padding
    return tokens


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True, **options)
        width = options.get("proj_size", 4) * (2 if options.get("bidirectional") else 1)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.fc = nn.Linear(4, CLASSES)
        self.embedding = nn.Embedding(9, 4)
        block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x == 0) if self.masked else None
        return self.fc(self.encoder(self.embedding(x), src_key_padding_mask=mask).mean(1))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(9, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bag(x))


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 1)
        self.norm = nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv2(self.conv1(x).relu())) + self.shortcut(x)).relu()


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1 + 2 * i, 2, 3, padding=1) for i in range(3))
        self.fc = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], 1)
        return self.fc(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Conv2d(3, CLASSES, 1)
        self.down, self.deep = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.up = nn.ConvTranspose2d(2, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        deep = self.deep(F.max_pool2d(self.down(x).relu(), 2)).relu()
        return self.out(torch.cat([x, self.up(deep)], 1)).mean((2, 3))


class HeadFirst(nn.Module):
    """Registers its head before its body."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
        if unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.body, self.other = (
            nn.Linear(5, CLASSES),
            nn.Linear(4, 5),
            nn.Linear(5, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        return self.one(hidden) + self.other(hidden).tanh()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(self.embedding(x).mean(1)).tanh())


class Repeated(nn.Module):
    """One cell, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.cell, self.first = nn.Linear(4, CLASSES), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[:, 0])
        for step in x[:, 1:].unbind(1):
            hidden = self.cell(hidden).tanh() + self.first(step)
        return self.fc(hidden)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(5, CLASSES), nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], 1) * shares.unsqueeze(-1)
        return self.fc(mixed.sum(1))


class Returns(nn.Module):
    """Returns its scores inside something."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.fc, self.wrap = nn.Linear(4, 5), nn.Linear(5, CLASSES), wrap

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return self.wrap(self.fc(hidden), hidden)


def freeze_body() -> nn.Module:
    model = HeadFirst()
    model.body.requires_grad_(False)
    return model


def flat(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def tiny_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=6, max_position_embeddings=8, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def tiny_gpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=9, n_embd=4, n_layer=2, n_head=2, n_positions=8, num_labels=CLASSES,
        pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config)


def lora_bert() -> nn.Module:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.0
    )
    return peft.get_peft_model(tiny_bert(), options)


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], set[str]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), points, {"2"}),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
        ),
        images,
        {"4"},
    ),
    "resnet": (
        lambda: nn.Sequential(
            Residual(1, 3), Residual(3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
        ),
        images,
        {"4"},
    ),
    "densenet": (Dense, images, {"fc"}),
    "unet": (UNet, images, {"out"}),
    "lstm": (lambda: Recurrent(nn.LSTM), series, {"fc"}),
    "bidirectional lstm": (
        lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2),
        series,
        {"fc"},
    ),
    "projected lstm": (lambda: Recurrent(nn.LSTM, proj_size=2), series, {"fc"}),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2), series, {"fc"}),
    "rnn": (lambda: Recurrent(nn.RNN, bias=False), series, {"fc"}),
    "relu rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), series, {"fc"}),
    "transformer": (lambda: Transformer(masked=False), texts, {"fc"}),
    "transformer with a mask": (lambda: Transformer(masked=True), texts, {"fc"}),
    "embedding bag": (Bag, texts, {"fc"}),
    "tied weights": (Tied, texts, {"embedding", "out"}),
    "two heads": (TwoHeads, points, {"one", "other"}),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        images,
        {"4"},
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
        points,
        {"2"},
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Flatten(), nn.Linear(48, 3)
        ),
        images,
        {"3"},
    ),
    "batch norm last": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        points,
        {"1"},
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), weight_norm(nn.Linear(5, 3))),
        points,
        {"2"},
    ),
    "spectral norm": (
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        points,
        {"2"},
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Linear(5, 3)),
        points,
        {"2"},
    ),
    "head before body": (HeadFirst, points, {"head"}),
    "frozen body": (freeze_body, points, {"head"}),
    "unused parameter": (lambda: HeadFirst(unused=True), points, {"head"}),
    "one cell several times": (Repeated, series, {"fc"}),
    "mixture of experts": (Experts, points, {"fc"}),
    "dict": (lambda: Returns(lambda z, h: {"logits": z, "hidden": h}), points, {"fc"}),
    "tuple": (lambda: Returns(lambda z, h: (z, h)), points, {"fc"}),
    "object": (lambda: Returns(lambda z, h: SimpleNamespace(logits=z)), points, {"fc"}),
    "bert": (tiny_bert, texts, {"classifier"}),
    "gpt": (tiny_gpt, texts, {"score"}),
    "lora": (lora_bert, texts, {"base_model.model.classifier.modules_to_save.default"}),
}
"""How it is built, its samples, and the modules of its last layer."""
