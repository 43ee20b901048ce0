"""What is held out, beside what tests/dataset/quality/test_leaks.py says of it. Reference: sets of texts."""

from itertools import accumulate

import pytest

from dataset.corpus import Corpus
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import ROOT


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_the_last_part_of_one_long_text_is_held_out_from_a_line_on(tmp_path, fraction):
    """nanoGPT's input.txt. Reference: the text itself; its two parts are all of it, and their bytes are counted."""
    lines = [f"{number}. A line of the play, \u7b2c{number}\u884c.\n" for number in range(400)]
    (tmp_path / "input.txt").write_text("".join(lines), encoding="utf-8")
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    corpus = Corpus(
        [str(tmp_path / "input.txt")], encoder, max_seq_len=32, seed=0, val_fraction=fraction, progress=False
    )
    trained, held_out = (
        encoder.decode(corpus.store.tokens[begin:end].tolist())
        for begin, end in zip(corpus.store.offsets[:-1], corpus.store.offsets[1:], strict=True)
    )
    assert trained + held_out == "".join(lines)
    assert trained in accumulate(lines)
    assert len(held_out) == pytest.approx(fraction * len("".join(lines)), rel=0.1)
    assert corpus.documents.tolist() == [0] and corpus.val_documents.tolist() == [1]
    assert corpus.validation().n_bytes == len(held_out.encode())
    assert corpus.plan(0).row_targets(0, corpus.plan(0).n_rows) == corpus.store.offsets[1] - 1
