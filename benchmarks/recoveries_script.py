"""A user's script for recoveries.py: `python recoveries_script.py RUN DELAY_BOUND SECONDS`, on as many ranks as it has.

A step is computing of no account, and a sleep in place of a device's work.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import hetsync

BATCH, EPOCHS = 64, 3
SLICE_SECONDS = 0.05  # of a rank's part of a batch


def main() -> None:
    run, bound, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    count = BATCH * round(seconds / SLICE_SECONDS / EPOCHS)
    samples = TensorDataset(torch.randn(count, 16), torch.randint(4, (count,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    with hetsync.join(run=run, delay_bound=bound) as job:
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        for _ in job.epochs(EPOCHS):
            for inputs, labels in loader:
                time.sleep(SLICE_SECONDS)
                job.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
                job.step(optimizer)


if __name__ == "__main__":
    main()
