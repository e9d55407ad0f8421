"""Puts the benchmarks, and what several tests share, on the path, from wherever pytest is started."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent / "support")]
