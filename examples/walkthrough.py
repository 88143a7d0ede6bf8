# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # A walk through FedALA
#
# Train FedALA and FedAvg on handwritten digits, see which clients gain, and look at the weights W
# that they have learned. This file is a program and a notebook: open it with Jupytext, or run its
# cells in an editor that knows `# %%`.

# %%
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fedala import ALA, run
from fedala.data import federate, load
from fedala.models import cnn
from fedala.report import page, plots
from fedala.report.curves import collect_curves
from fedala.report.runs import read_run
from fedala.runs.folder import RunFolder

ROUNDS, CLIENTS = 10, 8
FOLDER = Path("runs/walkthrough")

# %% [markdown]
# ## The data: every client has something else
#
# Dir(0.1) gives every client most samples of a few classes. The area of a circle shows how many
# samples of a class a client holds.

# %%
digits = load("digits")
federation = federate(digits, "dir:0.1", clients=CLIENTS)
plots.draw_split(federation.counts(), digits.class_names, "digits, Dir(0.1)")

# %% [markdown]
# ## Train
#
# Two methods, two seeds each. A run folder holds all results.

# %%
result = run(
    method="fedala,fedavg", dataset="digits", partition="dir:0.1", clients=CLIENTS,
    rounds=ROUNDS, seeds=2, record_weights=1, out=FOLDER, force=True,
)  # fmt: skip
for name, method in result.methods.items():
    best, final = 100 * method.best.mean(), 100 * method.final.mean()
    print(f"{name}: best round {best:.1f} %, last round {final:.1f} %")

# %% [markdown]
# ## Learning curves, with the seeds as bands

# %%
saved_run = read_run(FOLDER)
accuracy_curves = {
    outcome.title: collect_curves(outcome, "accuracy") for outcome in saved_run.results.values()
}
plots.draw_curves(accuracy_curves, "test accuracy")

# %% [markdown]
# ## Which clients gain, which lose

# %%
accuracies = {
    outcome.title: saved_run.client_scores(name).mean(0)
    for name, outcome in saved_run.results.items()
}
gains = accuracies["FedALA"] - accuracies["FedAvg"]
for client in np.argsort(-gains):
    print(f"client {client}: {100 * gains[client]:+.1f} points against FedAvg")
plots.draw_client_scores(accuracies)

# %% [markdown]
# ## W over the rounds
#
# The run has recorded how W is spread: its mean and a histogram, for every client and every
# parameter that ALA blends. W starts at ones (take everything from the global model). The initial
# stage moves it. Later rounds move it little.

# %%
cube, (_, rounds, clients, parameters) = saved_run.recorded_weights("fedala")
for round, mean in zip(rounds, cube[..., 0].mean((0, 2)), strict=True):
    print(
        f"round {round}: mean of W",
        {name: float(value.round(3)) for name, value in zip(parameters, mean, strict=True)},
    )
plots.draw_heat_map(
    cube[:, :, :, 0, 0].mean(0).T, clients, rounds,
    xlabel="round", ylabel="client", label=parameters[0], limits=(0.8, 1),
)  # fmt: skip

# %% [markdown]
# ## W itself
#
# The same by hand, for one client: its personal model, the global model, its own training samples.
# W has the shape of the parameter, so each row of the last layer belongs to a class. Which classes
# does the client take from the others?

# %%
client = int(np.argmax(federation.counts("train").sum(1)))
local, received = cnn((1, 28, 28), digits.classes), cnn((1, 28, 28), digits.classes)
run_folder = RunFolder(FOLDER)
local.load_state_dict(run_folder.model("fedala", seed=0, client=client))
received.load_state_dict(run_folder.model("fedala", seed=0))
rows = torch.as_tensor(federation.train[client])
data = digits.x[rows].float() / 127.5 - 1, digits.y[rows]  # pixels from −1 to 1, as in the run

ala = ALA(layers=1)
report = ala.initialize(local, received, data, loss=F.cross_entropy)
print(f"client {client}: {report.epochs} epochs of weight learning,", end=" ")
print(f"loss {report.losses[0]:.3f} → {report.losses[-1]:.3f}")
by_class = ala.weights["fc2.weight"].mean(1)
samples = federation.counts("train")[client]
for label in range(digits.classes):
    print(f"class {label}: {samples[label]:3d} samples, mean of W {by_class[label]:.3f}")

# %% [markdown]
# ## One page with all of it
#
# `fedala report runs/walkthrough` does the same. With `--plots figures`, it also writes the figures
# as .png and .pdf.

# %%
print("The page:", page.write([FOLDER]))
