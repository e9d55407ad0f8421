"""What `hetsync profile` shows: its ranks, their link, and what HetSync gains on them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import choose_shares
from hetsync.cli.simulated_job import LARGEST_TABLE
from hetsync.config.records import plain
from hetsync.config.schema import Config, SyncConfig
from hetsync.console import duration, plain_console
from hetsync.emulation.cluster import Cluster, Link, PairLink
from hetsync.simulate.gain import Gain, gain_of
from hetsync.simulate.left_out import Prediction, predictions
from hetsync.simulate.scenario import Traffic

UNCERTAIN = 0.1  # of a speed: beyond, another measurement would say something else
TELLING = 0.02  # of samples/s: less is no reason to leave a device out


@dataclass(frozen=True)
class Answer:
    """What there is to say of a recipe on the ranks of a cluster. `samples`: of its whole training."""

    config: Config
    cluster: Cluster
    ranks: Sequence[RankProfile]
    samples: int
    gain: Gain
    predicted: Sequence[Prediction]


def answer_of(
    config: Config, cluster: Cluster, ranks: Sequence[RankProfile], traffic: Traffic, adaptive: bool, samples: int
) -> Answer:
    """Simulated; arguments as those of `gain_of`."""
    gain = gain_of(config, cluster, ranks, traffic, adaptive)
    return Answer(config, cluster, ranks, samples, gain, predictions(config, cluster, ranks, traffic, adaptive))


def show(answer: Answer, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(_plain(answer), indent=1))
        return
    config, cluster, profiles, gain = answer.config, answer.cluster, answer.ranks, answer.gain
    console = plain_console(soft_wrap=True, force_terminal=False)
    if len(profiles) <= LARGEST_TABLE:
        console.print(_ranks(config, profiles))
    else:
        console.print(f"{len(profiles):,} ranks, too many to show one by one")
    console.print(link_sentence(cluster.link, len(profiles)))
    console.print(*links_sentences(cluster.links), sep="\n", end="\n" if cluster.links else "")
    console.print(_ways(gain))
    console.print(settings_sentence(config.sync))
    console.print(*gain_sentences(cluster, profiles, gain), sep="\n")
    if answer.predicted:
        console.print(
            f"predicted samples/s, and the time that {answer.samples:,} samples take, with all devices and fewer:"
        )
        console.print(_without(answer))
        console.print(*slower_sentences(cluster, answer.predicted), sep="\n")


def _plain(answer: Answer) -> dict[str, Any]:
    shares = choose_shares(answer.config.sync, answer.config.data.batch_size, answer.ranks)
    return {
        "cluster": plain(answer.cluster),
        "ranks": [{**asdict(profile), "share": n} for profile, n in zip(answer.ranks, shares, strict=True)],
        "gain": asdict(answer.gain),
        "samples": answer.samples,
        "predicted": [asdict(each) for each in answer.predicted],
    }


def _ranks(config: Config, profiles: Sequence[RankProfile]) -> Table:
    shares = choose_shares(config.sync, config.data.batch_size, profiles)
    table = Table("rank", "host", "device", "samples/s", "95 %", "most samples", "share")
    for rank, (profile, share) in enumerate(zip(profiles, shares, strict=True)):
        rate = f"{profile.time.rate(max(1, share)):,.1f}"
        cap = "any" if profile.cap is None else f"{profile.cap:,}"
        table.add_row(str(rank), profile.host, profile.device, rate, _interval(profile), cap, str(share))
    return table


def _interval(profile: RankProfile) -> str:
    if profile.emulated:
        return "as given"
    return "unknown" if profile.uncertainty is None else f"± {profile.uncertainty:.1%}"


def link_sentence(link: Link | None, ranks: int) -> str:
    if link is None or ranks == 1:
        return "link: free"
    if link.compute_fraction is not None:
        return f"link: a sum of all weights takes {link.compute_fraction:g} of a slice's time"
    a_rank = "" if link.bytes_per_second is None else " a rank"
    return f"link: {link.latency_seconds * 1e3:.3f} ms a sum, {_rate(link)}{a_rank}"


def links_sentences(links: Sequence[PairLink]) -> list[str]:
    """Between two ranks, the slowest first; of many the slowest only."""
    slowest = sorted(links, key=lambda pair: (pair.bytes_per_second or math.inf, -pair.latency_seconds))
    lines = [f"  {_where(pair)}: {pair.latency_seconds * 1e3:.3f} ms, {_rate(pair.link)}" for pair in slowest]
    left = len(lines) - LARGEST_TABLE
    return lines if left <= 0 else [*lines[:LARGEST_TABLE], f"  {left:,} others are faster"]


def _where(pair: PairLink) -> str:
    one, other = pair.between
    return f"within {one}" if one == other else f"between {one} and {other}"


def _rate(link: Link) -> str:
    return "unlimited" if link.bytes_per_second is None else f"{link.bytes_per_second / 1e6:,.1f} MB/s"


def _ways(gain: Gain) -> Table:
    table = Table("simulated", "samples/s", "of the devices' own")
    rows = {
        "synchronous, equal shares": gain.equal,
        "synchronous, shares by speed": gain.by_speed,
        "this recipe": gain.recipe,
    }
    for name, rate in rows.items():
        table.add_row(name, f"{rate:,.1f}", f"{rate / gain.alone:.3f}")
    return table


def settings_sentence(sync: SyncConfig) -> str:
    bound = "no bound" if sync.delay_bound is None else f"D = {sync.delay_bound}"
    quorum_and_grace = "" if sync.delay_bound == 0 else f", q = {sync.quorum}, grace {sync.grace}"
    return f"this recipe: {bound}{quorum_and_grace}, K = {sync.accumulation}"


def gain_sentences(cluster: Cluster, profiles: Sequence[RankProfile], gain: Gain) -> list[str]:
    """The answer, and what it leaves out."""
    lines = [
        f"HetSync gains {_factor(gain.recipe, gain.equal)} over equal shares and {_factor(gain.recipe, gain.by_speed)}"
        f" over shares by speed, in samples/s of {gain.slices} simulated slices"
    ]
    if cluster.jitter is None and not cluster.events:
        lines.append("steps are simulated without jitter: where they vary, waiting for all costs more than this")
    uncertain = sum(profile.uncertainty is None or profile.uncertainty > UNCERTAIN for profile in profiles)
    if uncertain:
        lines.append(
            f"careful: the speeds of {uncertain} ranks are uncertain by more than {UNCERTAIN:.0%}, and so is this:"
            " take idle hosts, and more run.profile_seconds"
        )
    return lines


def _factor(rate: float, other: float) -> str:
    return f"a factor of {rate / other:.2f}" if rate > 1.005 * other else f"nothing (a factor of {rate / other:.2f})"


def _without(answer: Answer) -> Table:
    table = Table("without")
    for heading in ("D = 0", "training", "auto", "", "training"):
        table.add_column(heading, no_wrap=True)
    whole = answer.predicted[0].rates
    for each in answer.predicted:
        rates, name = each.rates, each.left_out.name
        if rates is None or whole is None:
            table.add_row(name, "not by them")
            continue
        told = [f"{rates.in_step:,.1f}", f"{rates.ruled:,.1f}"]
        if each.left_out.ranks:
            told = [f"{rate} {change:+.1%}" for rate, change in zip(told, rates.over(whole), strict=True)]
        times = [duration(answer.samples / rate) for rate in (rates.in_step, rates.ruled)]
        table.add_row(name, told[0], times[0], f"D = {rates.delay_bound}", told[1], times[1])
    return table


def slower_sentences(cluster: Cluster, predicted: Sequence[Prediction]) -> list[str]:
    """Which devices make the job slower, which cannot be left out, and what is not known of that."""
    whole, *rest = [(each.left_out.name, each.rates) for each in predicted if each.rates is not None]
    changes = {name: rates.over(whole[1]) for name, rates in rest}
    best = [max(changes, key=lambda name: changes[name][way], default="") for way in (0, 1)]
    slower = [way for way in (0, 1) if changes and changes[best[way]][way] > TELLING]
    lines = []
    for name in dict.fromkeys(best[way] for way in slower):
        in_step, ruled = changes[name]
        told = (
            f"this job is faster without {name}: {in_step:+.1%} samples/s at D = 0, {ruled:+.1%} at auto; start it so"
        )
        lines.append(f"{told}, or take sync.delay_bound auto" if slower == [0] else told)
    refused = [f"not without {each.left_out.name}: {each.refused}" for each in predicted if each.refused]
    return [*(lines or ["no device makes this job slower"]), *refused, *_unknown(cluster)]


def _unknown(cluster: Cluster) -> list[str]:
    """Of sums of fewer ranks."""
    link = cluster.link or Link()
    if link.compute_fraction is not None:
        return ["careful: here sums take a part of a slice, however many ranks there are: what fewer save is not known"]
    if cluster.links:
        return ["sums of fewer ranks are as much faster as the slowest link of their ring; its latency stays as it is"]
    if link == Link():
        return []
    return ["sums of fewer ranks are taken to have this latency and bandwidth: who holds them up is not known"]
