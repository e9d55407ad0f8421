"""One rank of hetsync-train under its CPU quota: python -m benchmarks.common.under_quota GROUPS ARGUMENTS."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.common.processes import launched_as
from benchmarks.common.quotas import join_group
from hetsync.cli import train


def main() -> None:
    join_group(Path(sys.argv[1]), launched_as()[0])
    train.main(sys.argv[2:])


if __name__ == "__main__":
    main()
