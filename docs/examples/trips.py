"""Travel times of trips through a synthetic city: mpirun -n N python trips.py"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import hetsync
from hetsync.data.sets.synthetic_city import synthetic_city
from hetsync.metrics import MAPE


class TravelTime(nn.Module):
    """Seconds of a trip, from its length, its driver, and the weekday and time of its start."""

    def __init__(self, drivers: int) -> None:
        super().__init__()
        self.driver = nn.Embedding(drivers, 8)
        self.weekday = nn.Embedding(7, 4)
        self.layers = nn.Sequential(nn.Linear(8 + 4 + 3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, trips: dict[str, torch.Tensor]) -> torch.Tensor:
        kilometres, angle = trips["dist"].log(), trips["minute"] / 1440 * 2 * torch.pi
        numbers = torch.stack([kilometres, angle.sin(), angle.cos()], 1).float()
        features = torch.cat([self.driver(trips["driver"]), self.weekday(trips["week"]), numbers], 1)
        pace = self.layers(features)[:, 0].exp()  # minutes a kilometre
        return 60 * pace * trips["dist"]


def percentage_error(model: nn.Module, trips: dict[str, torch.Tensor]) -> torch.Tensor:
    return 100 * ((model(trips) - trips["time"]).abs() / trips["time"]).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--delay-bound", type=int, default=4)
    options = parser.parse_args()
    with hetsync.join(delay_bound=options.delay_bound) as job:
        torch.manual_seed(0)
        city = synthetic_city(trips=2000, drivers=20)
        model = TravelTime(drivers=20).to(job.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
        loader = DataLoader(city.train, 32, shuffle=True, collate_fn=city.collate)
        test_loader = DataLoader(city.test, 256, collate_fn=city.collate)
        model, optimizer, scheduler, loader, test_loader = job.prepare(model, optimizer, scheduler, loader, test_loader)

        def validate() -> dict[str, MAPE]:
            mape = MAPE()
            for trips in test_loader:
                mape.update(model(trips), trips["time"])
            return {"mape": mape}

        for _ in job.epochs(options.epochs):
            for trips in loader:
                loss = percentage_error(model, trips)
                job.backward(loss)
                job.step(optimizer)
            scheduler.step(job.evaluate(validate)["mape"])


if __name__ == "__main__":
    main()
