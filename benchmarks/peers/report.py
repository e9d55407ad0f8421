"""From the jobs' records to figures, Markdown and plots. A record is what `peers.json` holds of one job."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plots import headless_pyplot
from benchmarks.common.report import Record, evaluations, grouped, spread, until_target
from benchmarks.peers.timeline import Timeline, total

Figure = Callable[[Record], float | None]
REFERENCE = "hetsync-delayed"  # what the second table compares with the others
CONTROL = "homogeneous"  # nobody should win there: what is gained is the machine's, such as ranks that wake at once
REAL_DEVICES = "throttled"  # to which the emulated control says nothing


SHARED = ("samples", "compute_fraction", "wait_fraction", "bytes_sent", "slices", "overruns")


def from_hetsync(
    summary: Mapping[str, Any],
    telemetry: Iterable[Mapping[str, Any]],
    timelines: Sequence[Timeline],
    peak_bytes: Sequence[int],
) -> dict[str, Any]:
    """A HetSync run's figures in the form in which peers write theirs; `telemetry` is rank 0's."""
    seconds = summary["train_seconds"]
    per_rank = [
        {key: rank[key] for key in SHARED}
        | {"communication_seconds": total(timeline, "sum")}
        | {"runtime_cpu_seconds": rank["runtime_cpu_fraction"] * seconds, "peak_bytes": peak}
        | {"device_samples_per_second": rank["device_samples_per_second"]}
        for rank, timeline, peak in zip(summary["per_rank"], timelines, peak_bytes, strict=True)
    ]
    return {
        "samples": summary["samples_applied"],
        "train_seconds": seconds,
        "metrics": summary["metrics"],
        "evaluations": evaluations(telemetry),
        "per_rank": per_rank,
        "staleness": summary["staleness"],
    }


# Figures of one job.


def rate(record: Record) -> float | None:
    """Samples/s of the whole job."""
    return float(record["result"]["samples"] / record["result"]["train_seconds"])


def efficiency(record: Record) -> float | None:
    """Of what the devices reach that never wait."""
    return (rate(record) or 0.0) / float(record["ideal"])


def drawn_efficiency(record: Record) -> float | None:
    """The same, against what the devices' own slices took in this job, whatever luck their jitter had."""
    drawn = sum(rank["device_samples_per_second"] for rank in record["result"]["per_rank"])
    return (rate(record) or 0.0) / float(drawn)


def time_to_target(record: Record, axis: str = "seconds") -> float | None:
    """`seconds` of training, or `samples`, until the target was first reached."""
    metric, target = record["target"]
    return until_target(record["result"]["evaluations"], metric, target, record["falling"], axis)


def final_metric(record: Record) -> float | None:
    return float(record["result"]["metrics"][record["target"][0]])


def idle(record: Record) -> float | None:
    """The part of the time in which devices computed nothing: mean over ranks."""
    return statistics.mean(1 - rank["compute_fraction"] for rank in record["result"]["per_rank"])


def most_waiting(record: Record) -> float | None:
    """The part of the time for which the rank that waited longest was blocked on others or on the network."""
    return max(float(rank["wait_fraction"]) for rank in record["result"]["per_rank"])


def communicating(record: Record) -> float | None:
    """The part of the time for which a collective was under way on a rank, whatever it did meanwhile: mean."""
    seconds = statistics.mean(rank["communication_seconds"] for rank in record["result"]["per_rank"])
    return float(seconds / record["result"]["train_seconds"])


def kilobytes_per_sample(record: Record) -> float | None:
    """Payload that a rank gives to collectives for each sample of the job: mean over ranks."""
    sent = statistics.mean(rank["bytes_sent"] for rank in record["result"]["per_rank"])
    return float(sent / 1000 / record["result"]["samples"])


def runtime_cpu(record: Record) -> float | None:
    """Of a core, mean over ranks."""
    seconds = statistics.mean(rank["runtime_cpu_seconds"] for rank in record["result"]["per_rank"])
    return float(seconds / record["result"]["train_seconds"])


def peak_megabytes(record: Record) -> float | None:
    return max(rank["peak_bytes"] for rank in record["result"]["per_rank"]) / 1e6


def overruns(record: Record) -> float:
    """Part of the slices for which the machine was slower than the device that it emulated."""
    ranks = record["result"]["per_rank"]
    return sum(rank["overruns"] for rank in ranks) / max(1, sum(rank["slices"] for rank in ranks))


# Tables.

COLUMNS: Mapping[str, tuple[Figure, str]] = {
    "samples/s": (rate, ".0f"),
    "efficiency": (efficiency, ".3f"),
    "of the speeds drawn": (drawn_efficiency, ".3f"),
    "s to target": (time_to_target, ".1f"),
    "final": (final_metric, ".4f"),
    "devices idle": (idle, ".1%"),
    "longest blocked": (most_waiting, ".1%"),
    "communicating": (communicating, ".1%"),
    "kB sent, a rank and sample": (kilobytes_per_sample, ".2f"),
    "runtime CPU": (runtime_cpu, ".1%"),
    "peak MB": (peak_megabytes, ".0f"),
}


def markdown(records: Sequence[Record]) -> str:
    """A table a workload and cluster, then the ratios to HetSync's delayed mode."""
    lines: list[str] = []
    for cells in grouped(records, "workload", "cluster").values():
        lines += [*head(cells[0]), *(row(peer, jobs) for (peer,), jobs in grouped(cells, "peer").items()), ""]
    return "\n".join([*lines, *recoveries(records), *ratios(records)]) + "\n"


def head(record: Record) -> list[str]:
    metric, value = record["target"]
    ceiling = f"; equal shares reach {record['equal'] / record['ideal']:.3f} at most" if "ideal" in record else ""
    target = f"target: {metric} {'≤' if record['falling'] else '≥'} {value:g}"
    return [
        f"**{record['workload']}, {record['title']}** ({target}{ceiling})",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]


def row(peer: str, jobs: Sequence[Record]) -> str:
    done = [job for job in jobs if "result" in job]
    if not done:
        return f"| {peer} | {jobs[0]['missing']} |" + " |" * (len(COLUMNS) - 1)
    cells = [spread([figure(job) for job in done], form) for figure, form in COLUMNS.values()]
    return f"| {peer} | {' | '.join(cells)} |"


def recoveries(records: Sequence[Record]) -> list[str]:
    """After the slow-down half-way, where there was one."""
    told = [record for record in records if record.get("result", {}).get("recovery")]
    if not told:
        return []
    lines = ["**After a rank has slowed down** (parts of the new ceiling; rounds until 20 in a row reach 0.97 of it)"]
    lines += ["", "| workload | | the next 20 rounds | rounds until back |", "| --- | --- | --- | --- |"]
    for (workload, peer), jobs in grouped(told, "workload", "peer").items():
        window, rounds = ([job["result"]["recovery"][key] for job in jobs] for key in ("window", "rounds"))
        lines.append(f"| {workload} | {peer} | {spread(window, '.3f')} | {spread(rounds, '.0f')} |")
    return [*lines, ""]


def ratios(records: Sequence[Record]) -> list[str]:
    """Medians over repetitions of ratios within a repetition."""
    lines = [f"**{REFERENCE} against the others** (above 1: it is faster; the last column: it sends more)", ""]
    lines += [f"| workload | cluster | against | samples/s | net of {CONTROL} | time to target | bytes sent |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    told = {key: pairs(jobs) for key, jobs in grouped(records, "workload", "cluster").items()}
    for (workload, cluster), against in told.items():
        for peer, met in against.items():
            faster = [ratio(rate(ours), rate(theirs)) for ours, theirs in met]
            sooner = [ratio(time_to_target(theirs), time_to_target(ours)) for ours, theirs in met]
            sent = [ratio(kilobytes_per_sample(ours), kilobytes_per_sample(theirs)) for ours, theirs in met]
            net = net_of(faster, told.get((workload, CONTROL), {}).get(peer, []), cluster)
            cells = [spread(values, ".2f") for values in (faster, net, sooner, sent)]
            lines.append(f"| {workload} | {cluster} | {peer} | {' | '.join(cells)} |")
    return lines


def pairs(cells: Sequence[Record]) -> dict[str, list[tuple[Record, Record]]]:
    """By peer: the reference's job and the peer's of each repetition that has both."""
    mine = {cell["seed"]: cell for cell in cells if cell["peer"] == REFERENCE and "result" in cell}
    others = [cell for cell in cells if cell["peer"] != REFERENCE and "result" in cell and cell["seed"] in mine]
    return {peer: [(mine[job["seed"]], job) for job in jobs] for (peer,), jobs in grouped(others, "peer").items()}


def net_of(
    faster: Sequence[float | None], control: Sequence[tuple[Record, Record]], cluster: str
) -> list[float | None]:
    """Ratios divided by the same pair's on equal devices, its median; nothing where there is no such control."""
    known = [found for ours, theirs in control if (found := ratio(rate(ours), rate(theirs))) is not None]
    if not known or cluster == REAL_DEVICES:
        return []
    return [None if value is None else value / statistics.median(known) for value in faster]


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


# Plots.


def plots(records: Sequence[Record], folder: Path) -> None:
    """efficiency.png and loss.png, a panel a workload and cluster."""
    pyplot = headless_pyplot()
    panels = grouped([record for record in records if "result" in record], "workload", "cluster")
    peers = list(dict.fromkeys(record["peer"] for record in records))
    colours = {peer: f"C{index}" for index, peer in enumerate(peers)}
    for name, draw in (("efficiency", draw_efficiency), ("loss", draw_loss)):
        height = max(2.4, 0.28 * len(peers) + 1)
        figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, height * len(panels)), squeeze=False)
        for axis, ((workload, _), cells) in zip(axes[:, 0], panels.items(), strict=True):
            draw(axis, cells, colours)
            axis.set_title(f"{workload}, {cells[0]['title']}", fontsize=9)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)


def draw_efficiency(axis: Any, cells: Sequence[Record], colours: Mapping[str, str]) -> None:
    for place, ((peer,), jobs) in enumerate(grouped(cells, "peer").items()):
        values = [efficiency(job) or 0.0 for job in jobs]
        middle = statistics.median(values)
        error = [[middle - min(values)], [max(values) - middle]]
        axis.barh(place, middle, xerr=error, color=colours[peer], capsize=3)
        axis.text(0.01, place, f"{middle:.3f}  {peer}", va="center", fontsize=7)
    axis.axvline(cells[0]["equal"] / cells[0]["ideal"], color="black", linestyle=":")
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.set_xlabel("efficiency (dotted: ceiling of equal shares)", fontsize=8)


def draw_loss(axis: Any, cells: Sequence[Record], colours: Mapping[str, str]) -> None:
    metric = "loss" if "loss" in cells[0]["result"]["metrics"] else cells[0]["target"][0]
    for (peer,), jobs in grouped(cells, "peer").items():
        for job in jobs:
            points = job["result"]["evaluations"]
            label = peer if job is jobs[0] else None
            x, y = [p["seconds"] for p in points], [p[metric] for p in points]
            axis.plot(x, y, color=colours[peer], marker=".", linewidth=1, label=label)
    axis.set_xlabel("seconds of training", fontsize=8)
    axis.set_ylabel(f"validation {metric}", fontsize=8)
    axis.set_yscale("log")
    axis.legend(fontsize=6)
