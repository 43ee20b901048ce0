"""The text of the benchmarks: measuring corpora where they are, the embedded one elsewhere."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from common.start import ROOT
from dataset.embedded_corpus import build_embedded_corpus

# Measuring corpora, public tokenizers, GLUE files and golden outputs, which the repository does not hold: docs/corpora.md tells
# how to make them. Tests that need them are skipped where they are absent, and benchmarks take the embedded corpus.
REFERENCE = Path(os.environ.get("MINIMIND_REFERENCE") or ROOT.parent / "shared")


def corpus_files() -> list[Path]:
    """English and Chinese, or the embedded corpus where there is no reference material."""
    files = [REFERENCE / "corpora" / f"{name}.train.jsonl" for name in ("en_wiki", "zh_wiki")]
    if not all(file.is_file() for file in files):
        files = [build_embedded_corpus()]
    return files


def texts_of(file: Path) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]
