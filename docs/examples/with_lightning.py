"""The script before.py, with Lightning: python with_lightning.py --devices N"""

import argparse
import math
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


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


class Classifier(lightning.LightningModule):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        warm_up, steps = 20, self.trainer.estimated_stepping_batches
        scheduler = LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()

    lightning.seed_everything(0)
    loader = DataLoader(Digits(train=True), options.batch_size // options.devices, shuffle=True)
    test_loader = DataLoader(Digits(train=False), 256)
    trainer = lightning.Trainer(
        devices=options.devices,
        max_epochs=options.epochs,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        default_root_dir=options.folder,
        callbacks=[ModelCheckpoint(options.folder, "best", monitor="accuracy", mode="max")],
    )
    trainer.fit(Classifier(options.learning_rate), loader, test_loader)


if __name__ == "__main__":
    main()
