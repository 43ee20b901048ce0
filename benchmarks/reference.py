"""Where the reference material lies: measuring corpora, public tokenizers, GLUE files and golden outputs.

The repository does not hold it; docs/corpora.md tells what it is and how to make it. The variable MINIMIND_REFERENCE
names the folder. Without it the folder `shared` beside the repository serves. Tests that need the material are skipped
where it is absent, and benchmarks take the embedded corpus.
"""

import os
from pathlib import Path

from common.paths import ROOT

REFERENCE = Path(os.environ.get("MINIMIND_REFERENCE") or ROOT.parent / "shared")
CORPORA = REFERENCE / "corpora"
