"""Look at the data before training on it.

    python scripts/inspect_data.py --data_path my.jsonl
    python scripts/inspect_data.py --data_path zh.jsonl:0.7 code/:0.3 --row 0
    python scripts/inspect_data.py --data_path chats.jsonl --row 0

It takes the data flags of train_pretrain.py (for conversations: train_sft.py), which then uses the token store
built here.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from common.errors import UserError, user_errors
from common.files import relative_to_cwd
from common.settings import flags_of
from common.wording import announce, counted, one_line, printable
from dataset.arrays import Ints
from dataset.chat.chat_corpus import ChatCorpus
from dataset.quality.copies import NEAR_FROM, NO_EARLIER, Copies, exact_copies, near_copies
from dataset.quality.oddities import LONG_ROWS, VERY_LONG, oddities_of
from dataset.reading.documents import is_chat_file
from dataset.reading.file_kinds import find_files
from dataset.shares import group_sources
from dataset.store.build import first_writable
from dataset.store.deduplicate import stored_texts
from dataset.store.token_store import ConcatStore
from dataset.tokenizing.encoder import load_tokenizer
from scripts.parsers import InspectSettings
from trainer.machine.command_line import run_cli
from trainer.machine.rank import ONE_RANK
from trainer.pretrain.data import DOCUMENTS, announce_embedded_corpus, data_of, open_corpus
from trainer.pretrain.settings import PretrainSettings
from trainer.sft.data import CONVERSATIONS
from trainer.sft.settings import SftSettings

# Characters of an example, and tokens decoded for one
EXCERPT, EXCERPT_TOKENS = 120, 80
# Shorter paragraphs, such as "Yes.", may well come twice in a text.
PARAGRAPH_FROM = 20


@dataclass
class Section:
    """A table with a title. below: findings, a line each."""

    title: str
    header: list[str]
    rows: list[list[str]]
    below: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """First column left-aligned, numbers right-aligned."""
        table = [self.header, *self.rows] if self.rows else []
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        lines = [self.title.upper()]
        for cells in table:
            aligned = [cells[0].ljust(widths[0])]
            aligned += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            lines.append(f"  {'  '.join(aligned)}")
        return "\n".join([*lines, *(f"  {line}" for line in self.below)])


class Piece(NamedTuple):
    """A document or a part of one, within a row. is_trained: for each token, true if it is a target."""

    title: str
    tokens: list[int]
    is_trained: list[bool]


def main(argv: Sequence[str] | None = None) -> int:
    settings = InspectSettings.parse(argv)
    with user_errors():
        look = DataLook(settings)
        # A wrong --row fails before all texts are read.
        n_rows = look.corpus.plan(0).n_rows
        for number in settings.row:
            if number >= n_rows:
                raise UserError(f"--row {number}: the first epoch has {counted(n_rows, 'row')}, counted from 0")
        for line in look.corpus.notices:
            announce(line)
        # The data files are read again, and may be gone.
        blocks = [str(section) for section in look.sections()]
        for number in settings.row:
            title, pieces = look.row(number)
            lines = [title, "  ⟦ ⟧: read, and not trained"]
            for piece in pieces:
                lines += [f"──── {piece.title}", text_of_piece(look.tokenizer, piece)]
            blocks.append("\n".join(lines))
    announce(printable("\n\n".join(blocks)))
    return 0


class DataLook:
    """The data of a command line: everything in its files, copies included."""

    def __init__(self, settings: InspectSettings) -> None:
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer_path)
        announce_embedded_corpus(settings, DOCUMENTS)
        self.groups = [source.paths for source in group_sources(data_of(settings))]
        self.first_file = find_files(self.groups[0][0], settings.text_suffixes)[0]
        self.is_chat = is_chat_file(self.first_file, settings.text_field)
        kind = CONVERSATIONS if self.is_chat else DOCUMENTS
        # Settings of the run that would train on this
        trainer = SftSettings if self.is_chat else PretrainSettings
        of_run = {name: value for name, value in settings.values().items() if name in flags_of(trainer)}
        self.run = trainer(**of_run, allow_val_overlap=True)
        self.encoder = kind.make_encoder(self.tokenizer, self.run)
        self.corpus = open_corpus(self.run, self.encoder, ONE_RANK, kind)
        # As on disk: a corpus may hold out the end of a text.
        self.store = ConcatStore(self.corpus.stores)
        self.lengths = np.diff(self.store.offsets)
        self.text_bytes = np.array(self.store.text_bytes)
        # Source of each document; its path and line are known once its text is read.
        self.names = [" ".join(paths) for paths in self.groups]
        self.source_of = np.repeat(np.arange(len(self.groups)), np.diff(self.store.bounds))
        self.location_of: dict[int, str] = {}
        # {kind: lines with examples}
        self.oddities: dict[str, list[str]] = {}
        self.odd_counts: Counter[str] = Counter()
        # Of each source; repeated: those that the same document has before
        self.paragraphs, self.repeated = Counter[int](), Counter[int]()

    def sections(self) -> list[Section]:
        """All sections. Reads all texts once."""
        copies = exact_copies(self.store.copy_hash)
        sections: list[Section] = []
        if self.settings.texts:
            copies = near_copies(self._texts(), copies, first_writable(self.corpus.stores[0].cache_folders))
            odd = []
            examples = []
            for kind, count in self.odd_counts.most_common():
                odd.append([f"{kind} ({LONG_ROWS} rows and more)" if kind == VERY_LONG else kind, f"{count:,}"])
                examples += self.oddities[kind]
            sections = [Section("Odd documents", ["", "documents"], odd, below=examples if odd else ["None."])]
        # After the texts are read, which tells the source and location of each document.
        return [self._sources(), self._lengths(), self._copies(copies), *sections]

    def _texts(self) -> Iterator[tuple[int, str]]:
        """Yields (number, text) of each document after looking at it."""
        spelt = [re.escape(token) for token in map(str, self.tokenizer.all_special_tokens) if token.strip()]
        # Without tokens, a class that matches nothing.
        special = re.compile("|".join(spelt) or r"[^\s\S]")
        self.names = [path for paths in self.groups for path in paths]
        n_sources = 0
        # A progress bar in a terminal only
        with tqdm(total=len(self.store), desc="texts", disable=not sys.stderr.isatty()) as bar:
            for i, store in enumerate(self.store.stores):
                source_of_file: list[int] = []
                for path in self.groups[i]:
                    of_path = find_files(path, self.run.text_suffixes)
                    source_of_file += [n_sources] * len(of_path)
                    n_sources += 1
                texts = stored_texts(store, store.files, self.encoder, self.run.text_field, self.run.split_text)
                for number, (file, line, text) in enumerate(texts, int(self.store.bounds[i])):
                    self.source_of[number] = source_of_file[file]
                    self.location_of[number] = f"{relative_to_cwd(store.files[file])}:{line}"
                    body = self.encoder.body(text)
                    if self.is_chat:
                        # The store counts the bytes of the whole line.
                        self.text_bytes[number] = len(body.encode("utf-8", "replace"))
                    # Without blank lines each line is one.
                    parts = re.split(r"\n\s*\n" if "\n\n" in body else "\n", body)
                    paragraphs = [part for part in parts if len(part) >= PARAGRAPH_FROM]
                    self.paragraphs[source_of_file[file]] += len(paragraphs)
                    self.repeated[source_of_file[file]] += len(paragraphs) - len(set(paragraphs))
                    n_tokens = int(self.lengths[number])
                    for kind, at in oddities_of(body, n_tokens, special, self.settings.max_seq_len):
                        self.odd_counts[kind] += 1
                        examples = self.oddities.setdefault(kind, [])
                        if len(examples) < 2 * self.settings.examples:
                            # With some context before it
                            excerpt = body[max(at - EXCERPT // 4, 0) :][: 4 * EXCERPT]
                            remark = f"{kind}; {n_tokens:,} tokens"
                            examples += example(self.location(number), remark, excerpt)
                    yield number, text
                    bar.update()

    def _documents_of_sources(self) -> Iterator[tuple[str, Ints]]:
        """Yields (name of a source, numbers of its documents)."""
        for number, name in enumerate(self.names):
            yield name, np.flatnonzero(self.source_of == number)

    def _sources(self) -> Section:
        header = ["", "conversations" if self.is_chat else "documents", "tokens", "MB of text", "bytes a token"]
        header += ["median length", "longest"] + (["tokens of answers"] if self.is_chat else [])
        answers = None
        # tokens of a document beside its text; of a conversation none: the template writes all
        added = sum(token_id is not None for token_id in (self.encoder.bos_id, self.encoder.eos_id))
        if isinstance(self.corpus, ChatCorpus):
            added = 0
            answers = self.corpus.answers.count(self.store, self.settings.max_seq_len - 1)
        rows = []
        for name, documents in self._documents_of_sources():
            lengths = self.lengths[documents]
            tokens, n_bytes = int(lengths.sum()), int(self.text_bytes[documents].sum(dtype=np.int64))
            in_texts = max(tokens - added * len(documents), 1)
            row = [name, f"{len(documents):,}", f"{tokens:,}", f"{n_bytes / 1e6:,.1f}", f"{n_bytes / in_texts:.2f}"]
            row += [f"{int(np.median(lengths)) if len(documents) else 0:,}", f"{int(lengths.max(initial=0)):,}"]
            if answers is not None:
                row.append(share_of(int(answers[documents].sum(dtype=np.int64)), tokens))
            rows.append(row)
        return Section("Sources", header, rows)

    def _lengths(self) -> Section:
        """Bins from each power of two to the next, empty ones in between included."""
        # 1 -> 0, 2 and 3 -> 1, 4 to 7 -> 2, ... frexp is exact, as a logarithm is not.
        powers = np.frexp(np.maximum(self.lengths, 1).astype(np.float64))[1] - 1
        documents = np.bincount(powers)
        tokens = np.bincount(powers, weights=self.lengths)
        rows = []
        for power in range(int(powers.min()), len(documents)):
            share = f"{tokens[power] / max(tokens.sum(), 1):.1%}"
            rows.append([first_to_last(1 << power, (2 << power) - 1), f"{documents[power]:,}", share])
        return Section("Lengths of documents", ["tokens", "documents", "of all tokens"], rows)

    def _copies(self, copies: Copies) -> Section:
        """Counts, and the documents with the most copies of each kind."""
        is_copy = copies.of != NO_EARLIER
        rows = []
        for number, (name, documents) in enumerate(self._documents_of_sources()):
            exact, copied = int(copies.is_exact[documents].sum()), int(is_copy[documents].sum())
            repeated = share_of(self.repeated[number], self.paragraphs[number])
            of_texts = [share_of(copied - exact, len(documents)), repeated]
            if not self.settings.texts:
                of_texts = ["not looked for"] * 2
            rows.append([name, share_of(exact, len(documents)), *of_texts])
        below = []
        if self.settings.texts and is_copy.any():
            below.append(
                f"Near: about {NEAR_FROM} and more of the runs of five characters are the same. --deduplicate exact or near "
                "leaves them out of training."
            )
        for kind, chosen in (("exact", copies.is_exact), ("near", is_copy & ~copies.is_exact)):
            originals, counts = np.unique(copies.of[chosen], return_counts=True)
            # A stable sort: of equal counts the earlier document comes first.
            for at in np.argsort(-counts, kind="stable")[: self.settings.examples]:
                original = int(originals[at])
                copy = int(np.flatnonzero(chosen & (copies.of == original))[0])
                n_copies = counted(int(counts[at]), f"{kind} copy", f"{kind} copies")
                remark = f"{n_copies}, the first in {self.location(copy)}"
                if kind == "near":
                    remark += f" (similarity {copies.similarity[copy]:.2f})"
                begin, end = self.store.offsets[original : original + 2]
                tokens = self.store.tokens[begin : min(end, begin + EXCERPT_TOKENS)]
                text = str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
                below += example(self.location(original), remark, text)
        return Section("Copies of earlier documents", ["", "exact", "near", "repeated paragraphs"], rows, below=below)

    def location(self, number: int) -> str:
        """file:line of a document, numbered over all sources; its number if the texts were not read."""
        i = int(np.searchsorted(self.store.bounds, number, side="right")) - 1
        unread = f"document {number - self.store.bounds[i]:,} of {' '.join(self.groups[i])}"
        return self.location_of.get(number, unread)

    def row(self, number: int) -> tuple[str, list[Piece]]:
        """(title, pieces) of row `number` of the first epoch, as the model gets it."""
        plan = self.corpus.plan(0)
        store = self.corpus.store
        # The padding is not shown.
        batch = self.corpus.assembler().arrays(plan.recipe(range(number, number + 1)))
        targets = batch.targets[0].tolist()
        documents = batch.document_ids[0].tolist()
        pieces = []
        for i, (document, start, pairs) in enumerate(plan.pieces_of_row(number)):
            positions = [position for position in range(plan.T) if documents[position] == i]
            begin, end = (int(offset) for offset in store.offsets[document : document + 2])
            tokens = store.tokens[begin + start : begin + start + pairs + 1]
            if isinstance(self.corpus, ChatCorpus):
                tokens = self.corpus.answers.restore_turn_starts(tokens)
            # The first token is input only. Each further one is the target of the position before it.
            is_trained = [False] + [targets[position] >= 0 for position in positions]
            part = "whole"
            if pairs + 1 < end - begin:
                part = f"its tokens {first_to_last(start, start + pairs)} of {end - begin:,}"
            split = self.corpus.split_document
            # On disk it is one document.
            location = self.location(document - (split is not None and document > split))
            title = (
                f"{location}, {part}; {'position' if len(positions) == 1 else 'positions'} "
                f"{first_to_last(positions[0], positions[-1])}, {counted(sum(is_trained), 'token')} trained"
            )
            pieces.append(Piece(title, tokens.tolist(), is_trained))
        title = (
            f"Row {number:,} of {plan.n_rows:,}: {plan.T} positions, "
            f"{counted(len(pieces), 'conversation' if self.is_chat else 'document')}, "
            f"{sum(target >= 0 for target in targets)} trained, {documents.count(-1)} of padding"
        )
        return title, pieces


def text_of_piece(tokenizer: Any, piece: Piece) -> str:
    """Its text, with marks around tokens that are no targets. tokenizer: of load_tokenizer."""
    parts = []
    before, end = "", 0
    for is_trained, of_run in groupby(piece.is_trained):
        end += len(list(of_run))
        # Decoded from the start: some decoders look at the previous token to decide on a space.
        text = str(tokenizer.decode(piece.tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        parts.append(text[len(before) :] if is_trained else f"⟦{text[len(before) :]}⟧")
        before = text
    return "".join(parts)


def example(location: str, remark: str, text: str) -> list[str]:
    """Two lines on a finding: its location, a remark, and the start of the text."""
    # Control characters become visible: an example may be about them.
    line = one_line(text)
    return [f"- {location}: {remark}", "    " + (line if len(line) <= EXCERPT else f"{line[:EXCERPT]} ...")]


def first_to_last(first: int, last: int) -> str:
    """A range as "0 to 1,200"; "3" if both ends are equal."""
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def share_of(number: int, total: int) -> str:
    """As `12 (0.3%)`."""
    return f"{number:,} ({number / max(total, 1):.1%})" if number else "0"


if __name__ == "__main__":
    run_cli(main)
