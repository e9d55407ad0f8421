"""Accelerate: accelerate launch accelerate_digits.py. On a HetSync job the import of Accelerator is another."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hetsync.data.sets.digits import digits
from hetsync.models.digits_cnn import DigitsCNN

EPOCHS = 8


def train(accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    data = digits()
    model = DigitsCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data.train, batch_size=64, shuffle=True)
    test_loader = DataLoader(data.test, batch_size=256)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader, test_loader = accelerator.prepare(loader, test_loader)

    def validate() -> float:
        model.eval()
        right = total = 0
        for images, labels in test_loader:
            with torch.no_grad():
                found = model(images).argmax(1)
            found, labels = accelerator.gather_for_metrics((found, labels))
            right += (found == labels).sum().item()
            total += len(labels)
        model.train()
        return right / total

    for epoch in range(EPOCHS):
        for images, labels in loader:
            with accelerator.autocast():
                loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accuracy = validate()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    train(Accelerator(mixed_precision="bf16"))
