"""The script before.py, with HetSync: mpirun -n N python after.py"""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import hetsync


class Digits(Dataset):
    """Images of 8 by 8 pixels and their labels; in training each is shifted by up to a pixel."""

    def __init__(self, train: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        chosen = [index for index in range(len(labels)) if (index % 5 > 0) == train]
        self.images = torch.tensor(pixels[chosen], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[chosen])
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.train:
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        return image, self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32 * 4 * 4, 10),
    )


def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> dict[str, float]:
    model.eval()
    correct = samples = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
            samples += len(labels)
    return {"accuracy": (correct, samples)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
    options = parser.parse_args()

    with hetsync.join(run=options.folder, resume="auto") as job:
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loader = DataLoader(Digits(train=True), options.batch_size, shuffle=True)
        test_loader = DataLoader(Digits(train=False), 256)
        model = network().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
        warm_up, steps = 20, options.epochs * len(loader)
        scheduler = LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))
        )
        model, optimizer, scheduler, loader, test_loader = job.prepare(model, optimizer, scheduler, loader, test_loader)
        for _ in job.epochs(options.epochs):
            model.train()
            for images, labels in loader:
                images, labels = images.to(device), labels.to(device)
                with torch.autocast(device.type, torch.bfloat16):
                    loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                job.backward(loss)
                job.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
            metrics = job.evaluate(evaluate, model, test_loader, device)
            job.keep_best(metrics["accuracy"])


if __name__ == "__main__":
    main()
