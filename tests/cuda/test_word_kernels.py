"""The kernels for means of words against torch's own functions, lane by lane."""

import os

import pytest
import torch
from small import assert_close, ragged_task, start_of
from torch import nn
from torch.func import functional_call, vmap

pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from fedala.cuda import words as kernels
from fedala.cuda.kernels import LaneKernels
from fedala.cuda.words import PlacedWords
from fedala.lanes import row_gradients
from fedala.lanes.optimizers import descend, pull
from fedala.lanes.trees import join, share
from fedala.lanes.words import WordGradient, mean_embedding
from fedala.methods import make
from fedala.models import fasttext
from fedala.simulation import Simulation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH, PLACES = 30, 6, 70


def draw_texts(*shape):
    """Draw texts that end in padding, in which words come more than once."""
    texts = torch.randint(1, ROWS, shape, generator=torch.Generator().manual_seed(0))
    texts[..., shape[-1] // 3 :: 2] = 0
    texts[0] = 0  # all texts of a lane, or one text, without a word
    return texts.int().to(DEVICE)


def draw_tables(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("padding", [0, 7, None])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_mean_is_the_mean_over_all_places(padding, is_shared):
    """Padding may have a row that is not zero, as noise makes it: it counts, too."""
    texts = draw_texts(3, 5, PLACES)
    tables = share(draw_tables(1, ROWS, WIDTH), 3) if is_shared else draw_tables(3, ROWS, WIDTH)
    pairs = zip(tables.double(), texts.long(), strict=True)
    expected = torch.stack([table[text].mean(1) for table, text in pairs])
    with torch.no_grad(), LaneKernels():
        found = vmap(lambda x, table: mean_embedding(x, table, padding))(texts, tables)
        alone = mean_embedding(texts[1], tables[1], padding)
    assert_close({"": found}, {"": expected}, 1e-6)
    assert_close({"": alone}, {"": expected[1]}, 1e-6)


@pytest.mark.parametrize("width", [1, 300])
def test_a_narrow_and_a_wide_table_that_stand_in_columns(width):
    """Means of a transposed table, and a step on one, are those of a plain one."""
    texts, plain = draw_texts(2, 3, 5), draw_tables(2, ROWS, width)
    columns = plain.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    words, values = PlacedWords.find(texts, 0), draw_tables(2, 3, width)
    expected = torch.stack([t[x].mean(1) for t, x in zip(plain, texts.long(), strict=True)])
    assert_close({"": words.average(columns)}, {"": expected}, 1e-6)
    factors = torch.tensor([0.5, -2.0], device=DEVICE)
    wanted = plain.clone()
    for lane, text, place in torch.cartesian_prod(*map(torch.arange, texts.shape)).tolist():
        if row := int(texts[lane, text, place]):
            wanted[lane, row] += factors[lane] * values[lane, text]
    for tables in (columns, plain):
        words.add(tables, values, factors)
        assert_close({"": tables}, {"": wanted}, 1e-5)


def test_a_table_in_another_type_takes_the_usual_way():
    texts, table = draw_texts(5, PLACES), draw_tables(ROWS, WIDTH).double()
    with torch.no_grad(), LaneKernels():
        found = mean_embedding(texts, table, 0)
    assert torch.equal(found, table[texts.long()].mean(1))


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr(row_gradients, "LEAST_ROWS", 10)
    task = ragged_task(
        [12, 8, 5], model=fasttext(ROWS, 3, WIDTH), device=DEVICE, dtype=torch.float32
    )
    task.x = draw_texts(len(task.x), PLACES)
    return task


def start(task, lanes):
    return join([start_of(task, lambda: fasttext(ROWS, 3, WIDTH))(seed) for seed in range(lanes)])


def find_dense_gradient(task, params, rows):
    """Return each lane's gradient of the table, from the plain model in float64."""
    found = []
    for lane in range(len(rows)):
        state = {n: value[lane].detach().double().requires_grad_() for n, value in params.items()}
        result = functional_call(task.model, state, (task.x[rows[lane]],))
        nn.functional.cross_entropy(result, task.y[rows[lane]]).backward()
        found.append(state["embedding.weight"].grad)
    return torch.stack(found)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_adds_to_the_rows_of_real_words(task, lanes):
    """To each once, however often the word comes in a batch. The same bits every time."""
    params, rows = start(task, lanes), torch.tensor([[1, 3, 5], [2, 4, 2]], device=DEVICE)[:lanes]
    expected = find_dense_gradient(task, params, rows)
    with LaneKernels():
        _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
        found = gradients["embedding.weight"]
        assert isinstance(found, WordGradient)
        assert isinstance(found.words, PlacedWords)
        assert_close({"": found.densify()[0]}, {"": expected}, 1e-7)
        assert torch.equal(found.densify()[0], found.densify()[0])
        after = params["embedding.weight"] - 0.1 * expected
        rates = torch.full((lanes,), 0.1, device=DEVICE)
        restore = found.save_rows(params["embedding.weight"])
        before = params["embedding.weight"].clone()
        descend(params, gradients, rates)
    assert_close({"": params["embedding.weight"]}, {"": after}, 1e-6)
    assert torch.equal(params["embedding.weight"][:, 0], before[:, 0])
    restore()
    assert torch.equal(params["embedding.weight"], before)


def test_a_proximal_step_is_the_dense_one(task):
    params, rows = start(task, 2), torch.tensor([[1, 3], [2, 4]], device=DEVICE)
    anchor = {name: value + 1 for name, value in params.items()}
    whole = find_dense_gradient(task, params, rows) - 2.0
    with LaneKernels():
        _, gradients = task.gradients(params, task.inputs(rows), task.targets(rows))
        pull(params, gradients, anchor, 2.0)
        assert_close({"": gradients["embedding.weight"].densify()[0]}, {"": whole}, 1e-6)


def test_a_batch_of_very_many_places_has_no_kernel(monkeypatch):
    monkeypatch.setattr(kernels, "MOST_PLACES", 5 * PLACES)
    table = draw_tables(ROWS, WIDTH)
    assert kernels.match_call(None, draw_texts(5, PLACES), table, 0, None)
    assert kernels.match_call(None, draw_texts(6, PLACES), table, 0, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedala", "apfl", "fedprox", "per-fedavg"])
def test_texts_on_the_gpu_train_as_on_the_cpu(method, monkeypatch):
    """Two rounds with captured steps, against float64 on the CPU."""
    monkeypatch.setattr(row_gradients, "LEAST_ROWS", 10)
    models = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        task = ragged_task([12, 8, 5], model=fasttext(ROWS, 3, WIDTH), device=device, dtype=dtype)
        task.x = draw_texts(len(task.x), PLACES).to(device)
        begun = start_of(task, lambda: fasttext(ROWS, 3, WIDTH))
        found = {}
        simulation = Simulation(make(method), task, begun, rounds=2)
        list(simulation.run(lambda p, found=found: found.update({p.client: p.model})))
        models.append(found)
    for client, own in models[0].items():
        assert_close({n: v.cpu() for n, v in own.items()}, models[1][client], 1e-5)
