"""A LightningModule, delay-synchronised: mpirun -np N python lightning_digits.py"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hetsync.data.sets.digits import digits
from hetsync.models.digits_cnn import DigitsCNN
from hetsync.neighbours.lightning import HetSyncStrategy


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = DigitsCNN()

    def training_step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any) -> None:
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


data = digits()
trainer = Trainer(
    strategy=HetSyncStrategy(delay_bound=4),
    max_epochs=8,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    Digits(),
    DataLoader(data.train, batch_size=64, shuffle=True),
    DataLoader(data.test, batch_size=256),
)
if trainer.is_global_zero:
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
