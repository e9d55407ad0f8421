"""The benchmark of ranks under CPU quotas: its arithmetic, on a starter that starts nothing. Imports no MPI."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import quotas


class Rehearsal:
    """Two ranks: without exchange one is done after half of the time."""

    def __init__(self):
        self.cells = []

    def run(self, cell):
        self.cells.append(cell)
        if cell.workload.folder is not None:
            return {"missing": "skipped: no data here"}
        apart = cell.peer == quotas.CONTROL
        seconds, ends = (10.0, (5.0, 10.0)) if apart else (8.0, (8.0, 8.0))
        per_rank = [{"samples": 400, "bytes_sent": 8000, "runtime_cpu_seconds": 1.0} for _ in ends]
        result = {"samples": 800, "train_seconds": seconds, "per_rank": per_rank, "metrics": {"accuracy": 0.9}}
        timeline = [
            [("compute", 0.0, 1.0), ("wait", 1.0, 2.0), ("compute", 2.0, end), ("rest", end, 12.0)] for end in ends
        ]
        return {"result": result, "timeline": timeline}


def options(**given):
    asked = {"workloads": ["digits"], "arms": list(quotas.ARMS), "percents": [50, 30], "repetitions": 2, "seconds": 20}
    return Namespace(**(asked | given))


def test_hetsync_is_held_against_ranks_at_work():
    starter = Rehearsal()
    records = list(quotas.measure(options(), starter))
    assert [record["at_work"] for record in records[:2]] == [120.0, 100.0]  # 400 in 5 s and 400 in 10 s; all in 8 s
    assert "| digits | hetsync-delayed | 100 | 100 | 0.833 |" in quotas.markdown(records[:2])
    assert quotas.verdict(records) == ["digits: 0.833, the goal is 0.92: missed"]


def test_jobs_last_as_long_as_is_asked_for_and_go_in_turn():
    starter = Rehearsal()
    list(quotas.measure(options(), starter))
    _, *others = starter.cells
    assert [(cell.peer, cell.seed) for cell in others] == [(arm, seed) for seed in (0, 1) for arm in quotas.ARMS]
    assert {cell.samples for cell in others} == {20 * 120}  # whole batches of 160
    assert all(cell.scenario.ranks == 2 and cell.workload.evaluations == 1 for cell in starter.cells)


def test_what_cannot_be_had_is_told_and_the_rest_measured():
    records = list(quotas.measure(options(workloads=["cifar10", "digits"]), Rehearsal()))
    text = quotas.markdown(records)
    assert "| cifar10 | unsynchronised | skipped: no data here |" in text
    assert "| digits | hetsync-delayed |" in text


@pytest.mark.parametrize("percents", [["100", "80"], ["0", "20"]])
def test_quotas_that_the_machine_has_not_are_refused(monkeypatch, capsys, percents):
    monkeypatch.setattr("sys.argv", ["quotas", "--percents", *percents])
    with pytest.raises(SystemExit) as end:
        quotas.parse()
    assert end.value.code == 2
    assert "160 at most together" in capsys.readouterr().err


def test_cgroups_have_the_scenarios_quotas(monkeypatch, tmp_path):
    from benchmarks.common import quotas as cgroups
    from benchmarks.peers import starter

    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(Path, "rmdir", lambda self: None)
    cell = next(iter_cells(options(percents=[60, 15])))
    with starter.throttled(cell) as folder:
        written = [int((folder / f"rank-{rank}" / "cpu.cfs_quota_us").read_text()) for rank in (0, 1)]
    assert [quota / cgroups.PERIOD_US for quota in written] == [0.6, 0.15]


def iter_cells(asked):
    starter = Rehearsal()
    next(quotas.measure(asked, starter))
    return iter(starter.cells)
