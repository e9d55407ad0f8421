"""The same script, delay-synchronised: mpirun -np N python accelerate_after.py"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hetsync
from hetsync.data.sets.digits import digits
from hetsync.models.digits_cnn import DigitsCNN
from hetsync.train.job import Job

EPOCHS = 8


def train(job: Job) -> None:
    torch.manual_seed(0)
    data = digits()
    model = DigitsCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data.train, batch_size=64, shuffle=True)
    test_loader = DataLoader(data.test, batch_size=256)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    model, optimizer, scheduler = job.prepare(model, optimizer, scheduler)
    loader, test_loader = job.prepare(loader, test_loader)

    def validate() -> tuple[int, int]:
        right = total = 0
        for images, labels in test_loader:
            found = model(images).argmax(1)
            right += (found == labels).sum().item()
            total += len(labels)
        return right, total

    for epoch in job.epochs(EPOCHS):
        for images, labels in loader:
            with job.autocast():
                loss = cross_entropy(model(images), labels)
            job.backward(loss)
            job.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accuracy = job.evaluate(validate)
        job.print(f"epoch {epoch}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    with hetsync.join(precision="bfloat16") as job:
        train(job)
