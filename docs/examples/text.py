"""A GRU learns to continue lines of text, those of this guide: mpirun -n N python text.py"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import hetsync
from hetsync.metrics import Mean

GUIDE = Path(__file__).resolve().parents[1] / "guide"
CHARACTERS, PADDING = 128, 0


def lines() -> list[torch.Tensor]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(GUIDE.glob("*.md")))
    return [torch.tensor([min(ord(c), CHARACTERS - 1) for c in line]) for line in text.splitlines() if len(line) > 1]


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=PADDING)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.output = nn.Linear(96, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.output(self.memory(self.embedding(text))[0])


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """In nats a character: of all characters but the first, given those before."""
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), ignore_index=PADDING)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--delay-bound", type=int, default=4)
    options = parser.parse_args()
    with hetsync.join(delay_bound=options.delay_bound) as job:
        torch.manual_seed(0)
        text = lines()
        train, test = [line for n, line in enumerate(text) if n % 8], text[::8]
        model = Writer().to(job.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        test_loader = DataLoader(test, 64, collate_fn=collate)
        model, optimizer, test_loader = job.prepare(model, optimizer, test_loader)
        loader = job.loader(
            train, 32, collate_fn=collate, costs=[len(line) for line in train]
        )  # long lines take longer

        def validate() -> dict[str, Mean]:
            loss = Mean()
            for batch in test_loader:
                loss.update(loss_of(model, batch), (batch[:, 1:] != PADDING).sum())
            return {"loss": loss}

        for _ in job.epochs(options.epochs):
            for batch in loader:
                job.backward(loss_of(model, batch))
                job.clip_grad_norm_(model.parameters(), 1.0)
                job.step(optimizer)
            job.evaluate(validate)


if __name__ == "__main__":
    main()
