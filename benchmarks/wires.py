"""What a wire format costs: seconds of one core for a GB of float32, and below which link it pays.

    python -m benchmarks.wires [--millions 16] [--repetitions 7]

A rank packs its addend and unpacks it again for what waits (`round_trip`), unpacks the shards of others and packs their
sum, and unpacks the sum of all: two times packing and three times unpacking of its values in all. Sending takes two
times the packed bytes. float32 is summed as it is. A wire pays where the time that it saves on the link is more than
the time that it costs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.common.report import keep, publish, spread
from hetsync.config.schema import WireFormat
from hetsync.plane.wire import WIRE_FORMATS, decode, encode, encoded_bytes

PACKED, UNPACKED, SENT = 2, 3, 2


def seconds_a_gigabyte(wire: WireFormat, values: torch.Tensor) -> tuple[float, float]:
    """Of one core: to pack, and to unpack."""
    began = time.process_time()
    data = encode(values, wire)
    packed = time.process_time()
    decode(data, values.numel(), wire)
    gigabytes = values.nbytes / 1e9
    return (packed - began) / gigabytes, (time.process_time() - packed) / gigabytes


def pays_below(share: float, seconds: float) -> float:
    """MB/s of a link on which what is not sent takes as long as the packing: slower ones gain."""
    return SENT * (1 - share) * 1000 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--millions", type=int, default=16, help="of values")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(options.millions * 1_000_000, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[tuple[float, float]]] = {wire: [] for wire in WIRE_FORMATS[1:]}
    for _ in range(options.repetitions):
        for wire in WIRE_FORMATS[1:]:
            found[wire].append(seconds_a_gigabyte(wire, values))
    lines = [
        "| wire | bytes, of float32's | packing, s a GB | unpacking, s a GB | pays below, MB/s |",
        "| --- " * 5 + "|",
    ]
    for wire in WIRE_FORMATS[1:]:
        share = encoded_bytes(values.numel(), wire) / values.nbytes
        packing, unpacking = ([each[way] for each in found[wire]] for way in (0, 1))
        below = [pays_below(share, PACKED * pack + UNPACKED * unpack) for pack, unpack in found[wire]]
        cells = [f"1/{1 / share:.4g}", spread(packing, ".2f"), spread(unpacking, ".2f"), spread(below, ".0f")]
        lines.append(f"| {' | '.join([wire, *cells])} |")
    keep(options.output, "wires", seconds=found)
    publish(options.output, "wires", "\n".join(lines))


if __name__ == "__main__":
    main()
