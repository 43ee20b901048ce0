"""What a finished run shows of itself: some passages of its data, in which its generator has replaced words and its
discriminator doubts some."""

import math
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from common.errors import UserError
from common.terminal import TerminalText, has_colours, width_of_terminal
from dataset.held_out import HeldOut
from dataset.reading.documents import BadLines, read_documents
from dataset.store.encode_worker import measure
from dataset.store.token_store import files_of
from dataset.tokenizing.encoder import DocumentEncoder
from model.electra.detection import Passage, outcome
from trainer.electra.detector import Detector, open_detector
from trainer.electra.passages import PARAGRAPH_END, passage_lines
from trainer.electra.settings import ElectraSettings
from trainer.job import Closing

PASSAGES = 6
# Documents that are looked at for them.
MOST_DOCUMENTS = 20_000
# Characters of a document in which a passage is looked for.
LOOKED_THROUGH = 100_000
# Seconds that the search leaves for reading the passages with both networks. A guess: half of SHOWING_S in clock.py, so that the
# search has as long.
NETWORKS_S = 1.5
# Characters of a passage, at least and at most. It ends with the sentence that brings it to LEAST_CHARACTERS.
LEAST_CHARACTERS = 100
MOST_CHARACTERS = 300
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")


def closing_of(
    settings: ElectraSettings,
    data_path: list[str],
    held_out: HeldOut | None,
    encoder: DocumentEncoder,
    discriminator: Path,
    seconds: float = math.inf,
) -> Closing | None:
    """What a run shows; None where its texts are too short, or not here. data_path: of the run; discriminator: the folder that it has left.
    seconds: that it may take. Where they are short it shows fewer passages.

    Errors: DataError, UserError, OSError where data or networks cannot be read, or no time is left.
    """
    end = time.monotonic() + seconds
    hashes = None
    paths = data_path
    if held_out is not None:
        hashes = set(held_out.val_store.doc_hash[held_out.val_documents].tolist())
        paths = settings.val_path or data_path
    files = files_of(paths, settings.text_suffixes, settings.cache_dir)
    texts = excerpts(files, hashes, encoder, settings.text_field, end - NETWORKS_S)
    if not texts:
        if time.monotonic() >= end - NETWORKS_S:
            raise UserError(
                f"the time of --budget is over; scripts/detect.py --model {discriminator.parent} shows texts"
            )
        return None
    # On the CPU, as detect.py would read them there; they are short.
    detector = open_detector("the networks", str(discriminator), torch.device("cpu"))
    passages = passages_of(texts, detector, settings.mask_share, end)
    what = "The text that was trained" if held_out is None else "Held-out text"
    title = f"{what}, in which the generator has written {settings.mask_share:.0%} of the tokens anew"
    record = {
        "passages": [passage.as_record() for passage in passages],
        "passages_of": f"{title}: {outcome(passages)}",
    }
    said = passage_lines(passages, width_of_terminal(), has_colours(sys.stdout))
    return Closing(record, TerminalText(f"\n{title}. {said}\n"))


def passages_of(texts: Sequence[str], detector: Detector, share: float, end: float) -> list[Passage]:
    """Of each text a passage, in which a share of the tokens was replaced; of the first one alone where time is over."""
    found: list[Passage] = []
    for seed, text in enumerate(texts):
        if found and time.monotonic() >= end:
            break
        found.append(detector.passage(text, share, seed))
    return found


def excerpts(
    files: Sequence[Path], hashes: Collection[int] | None, encoder: DocumentEncoder, text_field: str, end: float
) -> list[str]:
    """The beginnings of some documents, of whole sentences, as they stand in the files.

    hashes: of the texts of the documents that may be taken; None: all may be. end: when the search ends with what it has found.
    Errors: DataError, OSError.
    """
    found: list[str] = []
    for text in islice(texts_of(files, encoder, text_field), MOST_DOCUMENTS):
        if time.monotonic() >= end:
            break
        body = encoder.body(text)
        if hashes is not None and measure(body).digest not in hashes:
            continue
        excerpt = excerpt_of(body[:LOOKED_THROUGH])
        if excerpt is not None:
            found.append(excerpt)
        if len(found) == PASSAGES:
            break
    return found


def texts_of(files: Sequence[Path], encoder: DocumentEncoder, text_field: str) -> Iterator[str]:
    """The texts of all documents. Faulty lines were told when the data was tokenised."""
    for file in files:
        for _, text in read_documents(file, text_field, BadLines(), encoder.blank_line_ends_document):
            yield text


def excerpt_of(text: str) -> str | None:
    """The first sentences of the first paragraph that is long enough; None where there is none."""
    for paragraph in PARAGRAPH_END.split(text):
        if len(paragraph.strip()) < LEAST_CHARACTERS:
            continue
        end = 0
        for match in SENTENCE_END.finditer(paragraph):
            end = match.start()
            if len(paragraph[:end].strip()) >= LEAST_CHARACTERS:
                break
        else:
            end = len(paragraph)
        excerpt = paragraph[:end].strip()
        if len(excerpt) > MOST_CHARACTERS:
            # Not within a word, where the text has blanks.
            cut = excerpt[:MOST_CHARACTERS]
            excerpt = cut.rsplit(None, 1)[0]
        return excerpt
    return None
