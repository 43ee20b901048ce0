"""What a text gives to a language model: how hard it is, found without training one, and what a mixture is made of."""

import lzma
from typing import Any

import numpy as np

from dataset.corpus import Corpus
from dataset.store.interface import HasTokens
from trainer.budget import laws

# So many places of the text are looked at, and so many tokens at each.
SAMPLES = 8
SAMPLE_TOKENS = 50_000
# Of the text of laws.WIKI: the bits per byte that xz makes of such samples, and the bytes of a token.
WIKI_XZ = 2.72
WIKI_BYTES_PER_TOKEN = 3.16


def parts_of(corpus: Corpus) -> tuple[laws.Part, ...]:
    """The sources of a mixture; none without shares."""
    parts = corpus.parts()
    if not parts:
        return ()
    named = zip(corpus.sources, parts, strict=True)
    return tuple(laws.Part(share, targets, name) for name, (share, targets) in named)


def text_scale(store: HasTokens, tokenizer: Any, bytes_per_token: float) -> float:
    """How many nats a token of this text takes, relative to the text of laws.WIKI.

    xz sees how much of a text repeats. What it makes of a byte goes along with what a model makes of it, over texts as
    different as novels and program code, to about a tenth. A token is worth more where it stands for more bytes.
    """
    tokens = store.tokens
    n = len(tokens)
    texts = []
    for place in range(SAMPLES):
        start = place * n // SAMPLES
        end = min(start + SAMPLE_TOKENS, (place + 1) * n // SAMPLES)
        ids = np.asarray(tokens[start:end]).tolist()
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    raw = "\n".join(texts).encode(errors="replace")
    if not raw.strip():
        return 1.0
    bits_per_byte = 8 * len(lzma.compress(raw, preset=6)) / len(raw)
    return bits_per_byte / WIKI_XZ * bytes_per_token / WIKI_BYTES_PER_TOKEN
