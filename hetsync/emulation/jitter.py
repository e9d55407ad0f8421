"""By how much an emulated device's slices scatter: drawn, fitted to a trace, or replayed from one."""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from statistics import NormalDist

from hetsync.emulation.cluster import Jitter, LognormalJitter, QuantileJitter, QuantileModel, TraceJitter
from hetsync.errors import UserError

JitterSampler = Callable[[], float]


def jitter_sampler(jitter: Jitter | None, seed: int, rank: int) -> JitterSampler:
    """A function that returns the next slice's factor on its mean time: mean 1, equal for equal (seed, rank).

    Without jitter every factor is 1. UserError where a trace cannot be read.
    """
    # Seeding by text goes through a hash, so that neighbouring ranks are not correlated.
    source = random.Random(f"{seed}/{rank}")
    if jitter is None:
        return lambda: 1.0
    if isinstance(jitter, LognormalJitter):
        return _lognormal(jitter, source).__next__
    if isinstance(jitter, TraceJitter):
        draws = _replayed(_read_trace(jitter), source, rank)
    else:
        draws = _fitted(jitter, source, rank)
    return (factor for factor in draws for _ in range(jitter.hold)).__next__


def likely_factors(jitter: Jitter, rank: int, count: int) -> list[float]:
    """So many factors as are equally likely in the long run, ascending, with mean 1.

    Each is from the middle of one of `count` equal parts of the distribution. UserError where a trace cannot be read.
    """
    middles = [(part + 0.5) / count for part in range(count)]
    if isinstance(jitter, LognormalJitter):
        factors = [math.exp(jitter.sigma * NormalDist().inv_cdf(middle)) for middle in middles]
    elif isinstance(jitter, TraceJitter):
        workers = _read_trace(jitter)
        worker = sorted(workers[rank % len(workers)])
        factors = [worker[int(middle * len(worker))] for middle in middles]
    else:
        model = jitter.models[rank % len(jitter.models)]
        factors = [_quantile(model, middle) for middle in middles]
    return [factor * count / sum(factors) for factor in factors]


def _lognormal(jitter: LognormalJitter, source: random.Random) -> Iterator[float]:
    sigma = jitter.sigma
    while True:
        yield math.exp(sigma * source.gauss(0, 1) - sigma * sigma / 2)


def _fitted(jitter: QuantileJitter, source: random.Random, rank: int) -> Iterator[float]:
    """An AR(1) process of normals, mapped through the normal's distribution and the fitted quantiles."""
    model = jitter.models[rank % len(jitter.models)]
    mean = sum((q - p) * (f + g) / 2 for (p, f), (q, g) in pairwise(_points(model)))
    keep = model.autocorrelation
    z = source.gauss(0, 1)
    while True:
        yield _quantile(model, NormalDist().cdf(z)) / mean
        z = keep * z + math.sqrt(1 - keep * keep) * source.gauss(0, 1)


def _points(model: QuantileModel) -> list[tuple[float, float]]:
    return list(zip(model.probabilities, model.factors, strict=True))


def _quantile(model: QuantileModel, probability: float) -> float:
    (p, f), (q, g) = next(pair for pair in pairwise(_points(model)) if probability <= pair[1][0])
    return f + (g - f) * (probability - p) / (q - p)


def _replayed(workers: list[list[float]], source: random.Random, rank: int) -> Iterator[float]:
    """One worker's records over and over, from a start that the seed chooses."""
    factors = workers[rank % len(workers)]
    start = source.randrange(len(factors))
    for i in count(start):
        yield factors[i % len(factors)]


def _read_trace(jitter: TraceJitter) -> list[list[float]]:
    """Every worker's step times in order of time, divided by their mean."""
    records: dict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        with open(jitter.path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                moment, seconds = float(row[jitter.time_column]), float(row[jitter.batch_time_column])
                if not math.isfinite(moment + seconds):
                    raise ValueError(f"{moment}, {seconds}")
                records[row[jitter.worker_column]].append((moment, seconds))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the trace that jitter.path names: {error}") from error
    except KeyError as error:
        raise UserError(f"trace {jitter.path} has no column {error}: set jitter's *_column keys") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"trace {jitter.path} holds something that is no number: {error}") from error
    times = [[seconds for _, seconds in sorted(worker)] for worker in records.values()]
    if not times or min(map(min, times)) < 0 or min(map(sum, times)) <= 0:
        raise UserError(f"trace {jitter.path} needs records with positive step times of every worker")
    return [[t * len(worker) / sum(worker) for t in worker] for worker in times]
