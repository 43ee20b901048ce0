"""Imported first by a benchmark that is run by path, as in `python benchmarks/bench.py`."""

import sys
from pathlib import Path

# Nothing in benchmarks/ may shadow a dependency.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.start import guard_imports

guard_imports()
