"""Findings of several nodes as one list, with what differs between them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetsync.doctor.checks import Finding, Verdict, findings
from hetsync.doctor.facts import Facts

# What nodes must not, or should not, have in several versions.
SAME_EVERYWHERE = {"HetSync": Verdict.PROBLEM, "MPI": Verdict.PROBLEM, "packages": Verdict.NOTE}

APART_SECONDS = 1.0


@dataclass(frozen=True)
class Comparison:
    """What most nodes have, with the worst verdict of all; `differs` has what was found on the others, by host."""

    finding: Finding
    differs: Mapping[str, str] = field(default_factory=dict)


def compare(nodes: Sequence[Facts]) -> list[Comparison]:
    """One line a check; `nodes` are of different hosts."""
    columns = zip(*(findings(facts) for facts in nodes), strict=True)
    return [_compared([facts.host for facts in nodes], column) for column in columns]


def _compared(hosts: Sequence[str], column: Sequence[Finding]) -> Comparison:
    kinds = [(finding.verdict, "" if finding.amounts else finding.found) for finding in column]
    (most, _), *others = Counter(kinds).most_common()
    usual = column[kinds.index(most)]
    worst = max(column, key=lambda finding: finding.verdict)
    differs = {host: finding.found for host, finding, kind in zip(hosts, column, kinds, strict=True) if kind != most}
    verdict, remedy = worst.verdict, worst.remedy
    if others and SAME_EVERYWHERE.get(usual.subject, Verdict.OK) > verdict:
        verdict, remedy = SAME_EVERYWHERE[usual.subject], "install the same version on every node"
    return Comparison(replace(usual, verdict=verdict, remedy=remedy), differs)


def compare_folders(path: str, seen: Mapping[str, bool]) -> Comparison:
    """`seen`: whether a host finds what rank 0 has written into the run folder."""
    if all(seen.values()):
        return Comparison(Finding("shared folder", Verdict.OK, f"all nodes see rank 0's {path}"))
    differs = {host: "has another" for host, sees in seen.items() if not sees}
    remedy = "choose a folder on a file system that all nodes see by --run.dir: --resume reads it on every rank"
    return Comparison(Finding("shared folder", Verdict.NOTE, f"not all nodes see rank 0's {path}", remedy), differs)


def compare_clocks(seconds: Mapping[str, float]) -> Comparison:
    """Of the hosts' time of day, read at the same moment."""
    ordered = sorted(seconds.values())
    middle = ordered[len(ordered) // 2]
    differs = {host: f"{at - middle:+.1f} s" for host, at in seconds.items() if abs(at - middle) > APART_SECONDS}
    apart = f"{ordered[-1] - ordered[0]:.3f} s apart"
    if not differs:
        return Comparison(Finding("time of day", Verdict.OK, apart, amounts=True))
    remedy = "let NTP or chrony set the clocks: times in telemetry of several nodes do not fit together"
    return Comparison(Finding("time of day", Verdict.NOTE, apart, remedy, amounts=True), differs)
