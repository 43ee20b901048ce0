"""The text of the benchmarks: the benchmark corpora if present, else the embedded one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from common.start import ROOT
from dataset.embedded_corpus import build_embedded_corpus

# Benchmark corpora, public tokenizers, GLUE files and golden outputs, not in the repository: docs/corpora.md says how to make
# them. Without them some tests are skipped, and benchmarks use the embedded corpus.
REFERENCE = Path(os.environ.get("MINIMIND_REFERENCE") or ROOT.parent / "shared")


def corpus_files() -> list[Path]:
    """English and Chinese, or the embedded corpus if these are missing."""
    files = [REFERENCE / "corpora" / f"{name}.train.jsonl" for name in ("en_wiki", "zh_wiki")]
    if not all(file.is_file() for file in files):
        files = [build_embedded_corpus()]
    return files


def texts_of(file: str | Path) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]
