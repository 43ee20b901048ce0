"""Imported first by a script that is run by path, as in `python scripts/generate.py`.

`main` reads the flags itself; here --help and wrong flags are answered before torch is imported, which takes seconds.
"""

import sys
from pathlib import Path

# Nothing in scripts/ may shadow a dependency.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.start import guard_imports

guard_imports()

from scripts.parsers import PARSERS

PARSERS[Path(sys.argv[0]).resolve().stem]().parse_args()
