"""Ranks that die at D = 0 while each batch has several steps: of two networks that take turns, on scaled losses, with
an average of the weights of one. Jobs of their own: python -m pytest tests/fault
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from jobs import ROOT, finished, mpirun, started, summary_of

ULFM = ["--with-ft", "ulfm"]
SAMPLES = 12 * 128

SCRIPT = """
import json, os, signal, sys, time, torch, hetsync
from torch.nn.functional import softplus
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from hetsync.sync.communicator import Communicator
from hetsync.sync.rounds import Rounds

into, *deaths = json.loads(sys.argv[1])
came = {}

def come_to(moment):
    came[moment] = came.get(moment, 0) + 1
    if [job.rank, moment, came[moment]] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)

def watch(owner, name, moment, when):
    inner = getattr(owner, name)
    def watched(*given):
        if when(*given):
            come_to(moment)
        return inner(*given)
    setattr(owner, name, watched)

watch(Rounds, "_sum_stage", "second stage", lambda self, stage, start: stage is self.gradients.stages[-1])
watch(Communicator, "landed", "landed", lambda *given: True)

torch.manual_seed(0)
critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
maker = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
average = AveragedModel(maker, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
of_critic = torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9)
of_maker = torch.optim.Adam(maker.parameters(), 0.01, eps=1e-3)
loader = DataLoader(TensorDataset(torch.randn(128, 4)), batch_size=16, shuffle=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

with hetsync.join(run=into, delay_bound=0, least_ranks=1, seed=3) as job:
    critic, maker, average, of_critic, of_maker, loader, scaler = job.prepare(
        critic, maker, average, of_critic, of_maker, loader, scaler
    )
    for epoch in job.epochs(12):
        for (real,) in loader:
            made = maker(real.flip(1))
            loss = softplus(critic(made.detach())).mean() + softplus(-critic(real)).mean()
            scaler.scale(loss).backward()
            if job.rank == 1:
                time.sleep(0.002)
            scaler.step(of_critic)
            of_critic.zero_grad()
            come_to("between")
            loss = (made - real).square().mean() + 0.1 * softplus(-critic(made)).mean()
            scaler.scale(loss).backward()
            scaler.step(of_maker)
            of_maker.zero_grad()
            of_critic.zero_grad()
            scaler.update()
            average.update_parameters(maker)
    if job.is_main:
        named = {"critic": critic, "maker": maker, "average": average}
        torch.save({name: module.state_dict() for name, module in named.items()}, into + ".pt")
"""


def trained(folder: Path, ranks: int, into: str, *deaths: tuple[int, str, int]) -> dict[str, dict[str, torch.Tensor]]:
    (folder / "script.py").write_text(SCRIPT)
    start = [*mpirun(ranks), *ULFM] if ranks > 1 else []
    words = [*start, sys.executable, "script.py", json.dumps([into, *deaths])]
    with started(words, folder, {"PYTHONPATH": str(ROOT)}) as process:
        done = finished(process)
    assert done.status == 0, done.story
    summary = summary_of(folder / into)
    assert summary["samples_applied"] == summary["samples_expected"] == SAMPLES
    assert sorted(failure["rank"] for failure in summary["failures"]) == sorted(rank for rank, *_ in deaths)
    found: dict[str, dict[str, torch.Tensor]] = torch.load(folder / f"{into}.pt")
    return found


def test_a_step_that_others_have_not_followed_is_made_once_more(tmp_path: Path) -> None:
    """Four deaths: between two steps, at the second's sum, and of rank 0 when a round has just landed there."""
    deaths = [(4, "second stage", 12), (3, "between", 30), (0, "landed", 50), (2, "second stage", 70)]
    alone = trained(tmp_path, 1, "alone")
    survived = trained(tmp_path, 5, "survived", *deaths)
    for name, state in alone.items():
        for key, value in state.items():
            off = float((survived[name][key].double() - value.double()).abs().max())
            assert off < 1e-5, f"{name}.{key} is off by {off}"
