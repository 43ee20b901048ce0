"""What inspect_data.py finds out about the data: counts, lengths, copies, languages, odd documents, leaks.

Two things here number documents. What is looked at is all that the files hold, copies included: `DataLook.stores`, numbered
through all of them. What is trained is `DataLook.corpus`, whose store --deduplicate leaves the copies out of. Without that flag a
document has one number in both. Numbers here are those of what is looked at, unless it is said that they are of the corpus.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from common.arrays import Array
from common.errors import DataError
from common.paths import ROOT
from common.wording import counted, one_line
from dataset.chat.encoder import ChatEncoder
from dataset.quality.copies import NONE, Copies, exact_copies, library, near_copies
from dataset.quality.evaluation_texts import evaluation_of
from dataset.quality.languages import language_of
from dataset.quality.leaks import LEAKED, RUNS_OF_DOCUMENT, Runs, Search, read_through
from dataset.quality.oddities import Oddity, OddityFinder
from dataset.reading.conversations import said_in
from dataset.reading.settings import OFF
from dataset.shares import name_of
from dataset.store.builder import first_writable
from dataset.store.deduplicate import open_sources
from dataset.store.format import TokenStore
from dataset.store.interface import Ints
from dataset.store.texts import stored_texts
from dataset.store.token_store import StoreOptions, files_of, places_of
from dataset.tokenizing.encoder import load_tokenizer
from scripts.data_reading import named_sources, notices_of, reading_of
from scripts.inspect_settings import InspectSettings

# Characters of an example.
EXCERPT = 120
# Tokens of a document that are decoded for one.
EXCERPT_TOKENS = 80


@dataclass
class Example:
    """A finding: where it stands, what is said of it, and some of the text."""

    place: str
    said: str
    text: str


@dataclass
class SourceFigures:
    """Of one path of --data_path. tokens: BOS and EOS included; n_bytes: of the texts, as UTF-8, of conversations that of what
    is said."""

    name: str
    documents: int
    tokens: int
    n_bytes: int
    bytes_per_token: float
    median: int
    longest: int
    exact: int
    near: int | None
    # Tokens of answers, of conversations.
    answers: int | None = None


@dataclass
class Bin:
    """Documents of `lowest` to `highest` tokens, and how many tokens they have together."""

    lowest: int
    highest: int
    documents: int
    tokens: int


@dataclass
class LanguageFigures:
    """Documents of one language, and the bytes of their texts."""

    name: str
    documents: int = 0
    n_bytes: int = 0


@dataclass
class OddFigures:
    """Documents with one kind of oddity."""

    kind: str
    documents: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class LeakFigures:
    """How much of some documents is in the training text.

    leaked: documents of which four runs in five are there; half: ... half of them; some: ... any. too_short: documents
    that have no run, which tell nothing.
    """

    name: str
    documents: int
    too_short: int
    leaked: int
    half: int
    some: int
    examples: list[Example]


@dataclass
class Figures:
    """All that was found; None where it was not looked for."""

    sources: list[SourceFigures]
    lengths: list[Bin]
    copies: Copies
    copy_examples: list[Example]
    near_missing: str | None
    languages: list[LanguageFigures] | None
    oddities: list[OddFigures] | None
    leaks: list[LeakFigures]


class DataLook:
    """The data of a command line. stores: what `figures` looks at; corpus: what a trainer makes of the same flags."""

    def __init__(self, settings: InspectSettings) -> None:
        self.settings = settings
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(settings.tokenizer_path)
        sources = named_sources(settings)
        self.groups = [source.paths for source in sources]
        reading = reading_of(settings, [path for paths in self.groups for path in paths], self.tokenizer)
        self.is_chat = reading.is_chat
        self.encoder = reading.encoder
        self.text_field = reading.text_field
        self.text_suffixes = reading.text_suffixes
        options: StoreOptions = {
            "cache_dir": settings.cache_dir,
            "text_field": self.text_field,
            "skip_bad_lines": settings.skip_bad_lines,
            "text_suffixes": self.text_suffixes,
        }
        # What is looked at has its copies, whatever is trained.
        self.stores = open_sources(self.groups, self.encoder, **options)
        self.files = [files_of(paths, self.text_suffixes, self.settings.cache_dir) for paths in self.groups]
        self.corpus = reading.corpus_kind(
            sources,
            self.encoder,
            max_seq_len=settings.max_seq_len,
            seed=settings.seed,
            pack=settings.pack,
            long_documents=reading.long_documents,
            val_path=settings.val_path,
            val_fraction=settings.val_fraction,
            allow_val_overlap=True,
            deduplicate=settings.deduplicate,
            length=reading.length,
            **options,
        )
        planned = self.corpus.planned
        self.notices = notices_of(settings, reading, planned is not None)
        shortage = planned.shortage() if planned is not None else None
        if shortage is not None:
            refused = shortage.told(settings.max_updates, done=0)
            self.notices.append(f"warning: a trainer refuses these rows: {refused}")
        # Documents before each store.
        self.bounds = np.cumsum([0] + [len(store) for store in self.stores])
        self.doc_hash = np.concatenate([store.doc_hash for store in self.stores])
        self.lengths = np.concatenate([store.lengths() for store in self.stores])
        self.text_bytes = np.concatenate([store.text_bytes for store in self.stores])
        self.texts: TextLook | None = None

    def figures(self) -> Figures:
        """Everything, which reads all texts once and all tokens once."""
        copies = exact_copies(self.doc_hash)
        near_missing = None
        if self.settings.texts:
            self.texts = TextLook(self)
            try:
                library()
            except DataError as error:
                near_missing = str(error)
            if near_missing is None:
                copies = near_copies(self.texts.read(), copies, self._scratch())
            else:
                for _ in self.texts.read():
                    pass
        has_near = self.settings.texts and near_missing is None
        return Figures(
            sources=self._sources(copies, has_near),
            lengths=self._lengths(),
            copies=copies,
            copy_examples=self._copy_examples(copies),
            near_missing=near_missing,
            languages=self.texts.sorted_languages() if self.texts else None,
            oddities=self.texts.sorted_oddities() if self.texts else None,
            leaks=self._leaks(),
        )

    def _scratch(self) -> Path:
        """Where what the search for near copies writes goes: beside the token store of the first source."""
        paths = self.groups[0]
        return first_writable(places_of(paths[0], self.files[0][0], self.settings.cache_dir))

    def _sources(self, copies: Copies, has_near: bool) -> list[SourceFigures]:
        if self.texts is not None:
            names = self.texts.source_names
            source_of = self.texts.source_of
        else:
            # Which documents of a store a path gave is known only when its texts are read.
            names = [name_of(paths) for paths in self.groups]
            source_of = np.repeat(np.arange(len(names)), np.diff(self.bounds))
        added = self.encoder.added_tokens
        answers = self._answers()
        figures = []
        for number, name in enumerate(names):
            mine = np.flatnonzero(source_of == number)
            lengths = self.lengths[mine]
            n_bytes = int(self.text_bytes[mine].sum(dtype=np.int64))
            exact = int(copies.is_exact[mine].sum())
            copied = int((copies.of[mine] != NONE).sum())
            figures.append(
                SourceFigures(
                    name=name,
                    documents=len(mine),
                    tokens=int(lengths.sum()),
                    n_bytes=n_bytes,
                    bytes_per_token=n_bytes / max(int(lengths.sum()) - added * len(mine), 1),
                    median=int(np.median(lengths)) if len(mine) else 0,
                    longest=int(lengths.max(initial=0)),
                    exact=exact,
                    near=copied - exact if has_near else None,
                    answers=None if answers is None else int(answers[mine].sum(dtype=np.int64)),
                )
            )
        return figures

    def _answers(self) -> Ints | None:
        """uint32: of each conversation the tokens that are trained; None where all of a text is."""
        if not isinstance(self.encoder, ChatEncoder):
            return None
        most = self.settings.max_seq_len - 1
        counts = [self.encoder.answers.count(store, np.arange(len(store)), most) for store in self.stores]
        return np.concatenate(counts)

    def _lengths(self) -> list[Bin]:
        """Each bin reaches from a power of two to the next, those without a document in between included."""
        # 1 -> 0, 2 and 3 -> 1, 4 to 7 -> 2, ... frexp is exact, as a logarithm is not.
        powers = np.frexp(np.maximum(self.lengths, 1).astype(np.float64))[1] - 1
        documents = np.bincount(powers)
        tokens = np.bincount(powers, weights=self.lengths)
        bins = []
        for power in range(int(powers.min()), len(documents)):
            bins.append(Bin(1 << power, (2 << power) - 1, int(documents[power]), int(tokens[power])))
        return bins

    def _copy_examples(self, copies: Copies) -> list[Example]:
        """The documents with the most copies of each kind."""
        examples = []
        for kind, chosen in (("to the letter", copies.is_exact), ("nearly", (copies.of != NONE) & ~copies.is_exact)):
            originals, counts = np.unique(copies.of[chosen], return_counts=True)
            # Of equally many the first one.
            for at in np.argsort(-counts, kind="stable")[: self.settings.examples]:
                original = int(originals[at])
                copy = int(np.flatnonzero(chosen & (copies.of == original))[0])
                said = f"{counted(int(counts[at]), 'copy', 'copies')} {kind}, the first in {self.place(copy)}"
                if kind == "nearly":
                    said += f" (similarity {copies.similarity[copy]:.2f})"
                examples.append(Example(self.place(original), said, self.excerpt(original)))
        return examples

    def _leaks(self) -> list[LeakFigures]:
        corpus = self.corpus
        names: list[str] = []
        runs: list[Runs] = []
        places: list[list[str] | None] = []
        if corpus.val_documents is not None:
            names.append(
                " ".join(self.settings.val_path or []) or f"held out by --val_fraction {self.settings.val_fraction:g}"
            )
            runs.append(corpus.validation_runs(corpus.val_documents.astype(np.int64), RUNS_OF_DOCUMENT))
            places.append(None)
        for path in self.settings.against:
            evaluation = evaluation_of(
                path, self.encoder, self.text_field, self.settings.skip_bad_lines, cache_dir=self.settings.cache_dir
            )
            names.append(path)
            runs.append(evaluation.runs)
            places.append(evaluation.places)
        searches = [Search(of_file) for of_file in runs]
        if searches:
            read_through(searches, corpus.training_text())
        figures = []
        for name, search, places_of_file in zip(names, searches, places, strict=True):
            figures.append(self._leak_figures(name, search.shares(), places_of_file))
        return figures

    def _leak_figures(self, name: str, shares: Array, places: Sequence[str] | None) -> LeakFigures:
        examples = []
        leaked = np.flatnonzero(shares >= LEAKED)
        # The surest first.
        for number in leaked[np.argsort(-shares[leaked], kind="stable")][: self.settings.examples]:
            said = f"{shares[number]:.0%} of its runs"
            if places is None:
                place, text = self._validation_example(int(number))
            else:
                place, text = places[number], ""
            examples.append(Example(place, said, text))
        return LeakFigures(
            name=name,
            documents=len(shares),
            too_short=int(np.isnan(shares).sum()),
            leaked=len(leaked),
            half=int((shares >= 0.5).sum()),
            some=int((shares > 0).sum()),
            examples=examples,
        )

    def _validation_example(self, number: int) -> tuple[str, str]:
        """(place, text) of a validation document, numbered among them."""
        corpus = self.corpus
        assert corpus.val_store is not None and corpus.val_documents is not None
        document = int(corpus.val_documents[number])
        begin, end = (int(offset) for offset in corpus.val_store.offsets[document : document + 2])
        text = self._decoded(corpus.val_store.tokens[begin : min(end, begin + EXCERPT_TOKENS)])
        if isinstance(corpus.val_store, TokenStore) and self.settings.val_path:
            files = files_of(self.settings.val_path, self.text_suffixes, self.settings.cache_dir)
            for stored in stored_texts(corpus.val_store, files, self.encoder, self.text_field):
                if stored.number == document:
                    return f"{shown_path(files[stored.file])}:{stored.line}", text
        return self.place_in_corpus(document), text

    def place_in_corpus(self, document: int) -> str:
        """file:line of a document, by its number in the corpus."""
        # A single text, of which the last part is held out.
        if len(self.doc_hash) == 1:
            return self.place(0)
        if self.settings.deduplicate == OFF:
            return self.place(document)
        # Of equal texts the first one is left.
        doc_hash = self.corpus.store.doc_hash[document]
        return self.place(int(np.flatnonzero(self.doc_hash == doc_hash)[0]))

    def place(self, number: int) -> str:
        """file:line of a document, numbered among all sources; its number where the texts were not read."""
        if self.texts is not None:
            return self.texts.place(number)
        store = int(np.searchsorted(self.bounds, number, side="right")) - 1
        return f"document {number - self.bounds[store]:,} of {name_of(self.groups[store])}"

    def as_read(self, tokens: Ints) -> Ints:
        """Tokens of a store as the model reads them."""
        return self.encoder.answers.as_read(tokens) if isinstance(self.encoder, ChatEncoder) else tokens

    def excerpt(self, number: int) -> str:
        """The beginning of a document, numbered among all sources."""
        store = int(np.searchsorted(self.bounds, number, side="right")) - 1
        return self._decoded(self.stores[store].document(number - int(self.bounds[store]))[:EXCERPT_TOKENS])

    def _decoded(self, tokens: Ints) -> str:
        return shortened(str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)))


class TextLook:
    """What is found by reading each text once."""

    def __init__(self, look: DataLook) -> None:
        self.look = look
        n = len(look.doc_hash)
        self.source_names: list[str] = []
        self.files: list[Path] = []
        # The source of each file, and the first file of each store.
        self.source_of_file: list[int] = []
        self.first_file: list[int] = []
        for paths in look.groups:
            self.first_file.append(len(self.files))
            for path in paths:
                files = files_of([path], look.text_suffixes, look.settings.cache_dir)
                self.source_of_file += [len(self.source_names)] * len(files)
                self.files += files
                self.source_names.append(path)
        self.source_of = np.zeros(n, np.int32)
        self.file_of = np.zeros(n, np.int32)
        self.line_of = np.zeros(n, np.int64)
        tokens = [str(token) for token in look.tokenizer.all_special_tokens]
        self.finder = OddityFinder(tokens, look.settings.max_seq_len)
        self.languages: dict[str, LanguageFigures] = {}
        self.oddities: dict[str, OddFigures] = {}

    def read(self) -> Iterator[tuple[int, str]]:
        """(number among all sources, text) of each document, once it was looked at."""
        look = self.look
        # A bar where somebody watches.
        with tqdm(total=len(look.doc_hash), desc="texts", disable=not sys.stderr.isatty()) as bar:
            for i, store in enumerate(look.stores):
                for stored in stored_texts(store, look.files[i], look.encoder, look.text_field):
                    number = int(look.bounds[i]) + stored.number
                    file = self.first_file[i] + stored.file
                    self.source_of[number] = self.source_of_file[file]
                    self.file_of[number] = file
                    self.line_of[number] = stored.line
                    text = said_in(stored.text) if look.is_chat else stored.text
                    self._look(number, look.encoder.body(text))
                    yield number, text
                    bar.update()

    def _look(self, number: int, body: str) -> None:
        if self.look.is_chat:
            # The store has the bytes of the whole line.
            self.look.text_bytes[number] = len(body.encode("utf-8", "replace"))
        language = language_of(body)
        of_language = self.languages.setdefault(language, LanguageFigures(language))
        of_language.documents += 1
        of_language.n_bytes += int(self.look.text_bytes[number])
        for oddity in self.finder.oddities_of(body, int(self.look.lengths[number])):
            of_kind = self.oddities.setdefault(oddity.kind, OddFigures(oddity.kind))
            of_kind.documents += 1
            if len(of_kind.examples) < self.look.settings.examples:
                of_kind.examples.append(self._example(number, body, oddity))

    def _example(self, number: int, body: str, oddity: Oddity) -> Example:
        # With some of what stands before.
        begin = max(oddity.at - EXCERPT // 4, 0)
        said = f"{int(self.look.lengths[number]):,} tokens"
        return Example(self.place(number), said, shortened(body[begin : begin + 4 * EXCERPT]))

    def place(self, number: int) -> str:
        return f"{shown_path(self.files[self.file_of[number]])}:{self.line_of[number]}"

    def sorted_languages(self) -> list[LanguageFigures]:
        """Those with the most text first."""
        return sorted(self.languages.values(), key=lambda figures: (-figures.n_bytes, figures.name))

    def sorted_oddities(self) -> list[OddFigures]:
        """The most frequent first."""
        return sorted(self.oddities.values(), key=lambda figures: (-figures.documents, figures.kind))


def shown_path(path: Path) -> str:
    """A path without what everybody knows of it."""
    if not isinstance(path, Path):
        return str(path)
    for folder in (Path.cwd(), ROOT):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path)


def shortened(text: str) -> str:
    """One line of at most EXCERPT characters."""
    # Control characters are shown by pictures, which are what an example may be about.
    line = one_line(text)
    return line if len(line) <= EXCERPT else f"{line[:EXCERPT]} ..."
