"""The tests run in parallel processes: one thread each."""

import torch

torch.set_num_threads(1)
