"""What `hetsync profile` shows: its ranks, their link, and what HetSync gains on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from hetsync.balance.profile import RankProfile
from hetsync.balance.shares import choose_shares
from hetsync.cli.simulated_job import LARGEST_TABLE
from hetsync.config.schema import Config, SyncConfig
from hetsync.console import plain_console
from hetsync.emulation.cluster import Cluster, Link, PairLink
from hetsync.simulate.gain import Gain

UNCERTAIN = 0.1  # of a speed: beyond, another measurement would say something else


def show(config: Config, cluster: Cluster, profiles: Sequence[RankProfile], gain: Gain) -> None:
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
