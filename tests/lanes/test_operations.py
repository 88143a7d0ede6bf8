"""Our count of operations is torch's, for layers that models usually have."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedala.lanes.operations import OperationCounter
from fedala.models import cnn, cnn1d, fasttext, lstm, mlp, resnet18


class Products(nn.Module):
    def forward(self, x):
        squares = x @ x.transpose(1, 2) + torch.bmm(x, x.transpose(1, 2))
        return torch.baddbmm(squares, x.matmul(torch.ones(4, 4)), x.transpose(1, 2))


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x[:, :3], x[:, :3])


IMAGES = torch.randn(2, 3, 32, 32)
CASES = {
    "cnn": (cnn((3, 32, 32)), IMAGES),
    "resnet18": (resnet18((3, 32, 32)), IMAGES),
    "mlp": (mlp(12, 3), torch.randn(5, 12)),
    "cnn1d": (cnn1d((9, 64), 5), torch.randn(2, 9, 64)),
    "fasttext": (fasttext(50, 3), torch.ones(4, 6, dtype=torch.int64)),
    "grouped": (nn.Conv2d(6, 9, 3, groups=3, stride=2), torch.randn(2, 6, 9, 9)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2), torch.randn(2, 6, 9, 9)),
    "three dimensions": (nn.Linear(4, 7), torch.randn(2, 3, 4)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
    "products": (Products(), torch.randn(2, 3, 4)),
    "plain attention": (Attention(), torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_that_torch_counts(name):
    model, x = CASES[name]
    model.train()  # in evaluation mode, attention would take a fused path
    with torch.no_grad(), FlopCounterMode(display=False) as expected:
        model(x)
    with torch.no_grad(), OperationCounter() as found:
        model(x)
    assert found.total == expected.get_total_flops() > 0


def test_the_gates_of_an_lstm_count():
    """Torch counts none of them if they are one fused operation."""
    with torch.no_grad(), OperationCounter() as found:
        lstm(8, 5)(torch.randn(2, 16, 8))
    width = lstm(8, 5).state_dict()
    gates = sum(v.numel() for name, v in width.items() if "weight" in name and v.shape[0] % 4 == 0)
    head = sum(v.numel() for name, v in width.items() if "weight" in name and v.shape[0] == 5)
    assert found.total == 2 * 2 * 16 * gates + 2 * 2 * head


def test_counting_does_not_load_torchs_compiler():
    """It takes two seconds, and a mode of torch's dispatcher would load it."""
    code = (
        "import sys, torch; from torch import nn\n"
        "from fedala.lanes.operations import OperationCounter\n"
        "with torch.no_grad(), OperationCounter(): nn.Linear(2, 2)(torch.ones(1, 2))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr
