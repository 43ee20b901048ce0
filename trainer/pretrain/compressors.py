"""What gzip and xz make of the held-out text: something to compare a model's bits per byte with."""

import gzip
import lzma
from typing import Any

import numpy as np

from common.arithmetic import ceil_div
from dataset.store.interface import Documents, Ints

# Of the text, at most about so many bytes are compressed, which takes a second.
SAMPLE_BYTES = 1 << 20


def compressed(store: Documents, documents: Ints, tokenizer: Any) -> dict[str, float]:
    """{"gzip": bits per byte, "xz": bits per byte, "bytes": of the text that was compressed}; {} where there is no text.

    documents: their numbers. Of a long text every n-th document is taken, so the same text gives the same figures.
    """
    n_bytes = int(store.text_bytes[documents].sum(dtype=np.int64))
    step = max(1, ceil_div(n_bytes, SAMPLE_BYTES))
    texts = []
    left = SAMPLE_BYTES
    for document in documents[::step].tolist():
        begin, end = int(store.offsets[document]), int(store.offsets[document + 1])
        # A document may be longer than all of the sample; no token stands for less than a byte of it, or nearly none does.
        ids = np.asarray(store.tokens[begin : min(end, begin + left)]).tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True).encode(errors="replace")
        texts.append(text)
        left -= len(text)
        if left <= 0:
            break
    raw = b"\n".join(texts)
    if not raw.strip():
        return {}
    return {
        "gzip": 8 * len(gzip.compress(raw, 9, mtime=0)) / len(raw),
        "xz": 8 * len(lzma.compress(raw, preset=6)) / len(raw),
        "bytes": len(raw),
    }
