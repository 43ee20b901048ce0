"""The data of a run: training documents, held-out documents, and the plan of each epoch.

From a file to a batch, in five steps:

    file -> text    split_into_blocks   dataset/reading/documents.py    finds the documents of a file of any kind
    text -> ids     DocumentEncoder     dataset/tokenizing/encoder.py   BOS, the ids of a text, EOS
    ids -> store    open_or_build       dataset/store/build.py          calls these two once; later runs map its files into memory
    store -> rows   Corpus.plan         dataset/packing.py              which documents share row r of an epoch, and in which order
    rows -> batch   Corpus.assembler    dataset/batches.py              ids, targets and positions, in processes of loader.py

Shares of several sources decide in the fourth step which documents an epoch takes (dataset/mixture.py).
"""

import copy
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Self

import numpy as np

from common.errors import DataError
from common.wording import counted
from dataset.arrays import Bools, Ints
from dataset.batches import Assembler, Batch, TargetFilter
from dataset.mixture import Mixture
from dataset.packing import EpochPlan, RowPlan, all_documents, target_counts
from dataset.quality.copies import rensa_library
from dataset.reading.beginnings import notices_on_texts
from dataset.reading.file_kinds import notices_on_files
from dataset.reading.settings import DEFAULTS, NEAR, OFF, TextSettings
from dataset.shares import Source, group_sources
from dataset.store.build import open_or_build
from dataset.store.deduplicate import copies_among
from dataset.store.token_store import ConcatStore, Documents, TokenStore
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.tokenizer_files import PROBE

# Arguments of a Corpus that are flags of the same names
FLAGS = (
    "max_seq_len",
    "seed",
    "pack",
    "long_documents",
    "val_path",
    "val_fraction",
    "allow_val_overlap",
    "deduplicate",
    "epochs",
)
# largest error of a share without a warning: whole documents seldom add up to it exactly
SHARE_TOLERANCE = 0.02
# Rows of a validation batch: fixed, so that the figures do not depend on the training batch.
EVAL_ROWS = 16
# Hashes decide, unless they hold out over MAX_RATIO times the share that is asked for, or less than 1 / MAX_RATIO of it. Then it is
# made up by the end of the longest document, at most MAX_PART of it; of fewer than MIN_DOCUMENTS that end is all of it.
MIN_DOCUMENTS, MAX_PART, MIN_PART_TOKENS, MAX_RATIO = 200, 0.9, 16, 2


class Corpus:
    """Tokenises new data, opens the token stores and plans epochs.

    data_path: paths, each with or without a share (`a.jsonl:0.7`), or sources. val_path: one or several paths of
    separate validation documents; val_fraction: share of the text that is held out, see `split_of`. deduplicate: as the
    flag; documents of val_path keep their copies, so that their loss stays comparable. epochs, n_rows: see Mixture.
    reading, progress: see `open_or_build`.
    `notices`: lines on the data for the user.
    Errors: DataError for missing or faulty files and shares, if nothing is left to train on or to evaluate, and if all
    validation documents are trained too, unless `allow_val_overlap`.
    """

    # error texts for epochs without rows and for validation documents without targets
    nothing_to_train = "no document of two tokens or more to train on"
    nothing_to_evaluate = "no document of two tokens or more"
    # conversations, with a loss on the answers only
    trains_answers = False
    # flags to check if a resume finds other data
    data_flags = "--data_path, --text_field, --split_text, --skip_bad_lines, --deduplicate"
    # masks the targets of a batch that are not trained; None: all are trained
    target_filter: TargetFilter | None = None

    def __init__(
        self,
        data_path: Sequence[str | Source],
        encoder: DocumentEncoder,
        reading: TextSettings = DEFAULTS,
        *,
        max_seq_len: int,
        seed: int,
        pack: bool = True,
        long_documents: str = "split",
        val_path: str | Sequence[str] | None = None,
        val_fraction: float = 0.0,
        allow_val_overlap: bool = False,
        deduplicate: str = OFF,
        epochs: int = 1,
        n_rows: int = 0,
        progress: bool = True,
    ) -> None:
        sources = group_sources(data_path)
        if deduplicate == NEAR:
            # Before hours of work
            rensa_library()
        open_store = partial(open_or_build, encoder=encoder, reading=reading, progress=progress)
        stores = [open_store(source.paths) for source in sources]
        self.sources = sources
        self.stores = stores
        self.store: TokenStore | ConcatStore = ConcatStore(stores) if len(stores) > 1 else stores[0]
        self.fingerprint = self.store.fingerprint
        self.max_seq_len = max_seq_len
        self.seed = seed
        self.pack = pack
        self.long_documents = long_documents
        self.val_fraction = val_fraction
        files = [file for store in stores for file in store.files]
        self.notices = notices_on_files(files)
        # numbers of the training documents
        self.documents = all_documents(self.store)
        if deduplicate != OFF:
            is_copy, self.fingerprint, lines = copies_among(stores, encoder, deduplicate, reading, progress)
            self.notices += lines
            self.documents = self.documents[~is_copy]
        self.notices += [line for store in stores for line in store.notices]
        # validation documents and their store, with --val_fraction `store` itself; None: no validation
        self.val_documents: Ints | None = None
        self.val_store: Documents | None = None
        # The document whose last part is held out: its number on disk
        self.split_document: int | None = None
        # The same; "whole texts", if others than by hash are held out; None: by hash
        self.held_out_part: int | str | None = None
        if val_path:
            paths = [val_path] if isinstance(val_path, str) else list(val_path)
            val_store = open_store(paths)
            files += val_store.files
            self.notices += [f"--val_path: {line}" for line in val_store.notices]
            what = f"--val_path {Source(paths).name}"
            self._set_val(val_store, all_documents(val_store), what, "name other documents")
            self._warn_of_overlap(val_store, what, allow_val_overlap)
        elif val_fraction:
            held_out = self._hold_out(encoder, val_fraction)
            self._set_val(self.store, held_out, f"what --val_fraction {val_fraction} holds out", "raise --val_fraction")
        self.notices += notices_on_texts(files, reading.split_text or encoder.document_end)
        # Earlier runs split single texts alone: one that held out whole texts of several does not go on with a part.
        self.part_layout = {"held-out part": self.held_out_part} if sum(map(len, stores)) > 1 else {}
        # Draws documents by the shares of the sources; None: no shares. After the split: held-out documents count
        # towards no share.
        self.mixture: Mixture | None = None
        if sources[0].shares is not None:
            # documents of `store` before each source, and in total
            bounds = np.cumsum([0, *map(len, stores)])
            if self.split_document is not None:
                bounds += bounds > self.split_document
            self.mixture = Mixture(
                self.store, sources, self.documents, bounds, self._epoch_plan, self._targets, seed, epochs, n_rows
            )
        # The whole run is one plan: a share changes over it, or a source may be repeated.
        self.is_one_plan = self.mixture is not None and self.mixture.is_one_plan
        # A share changes over the run, so another length would give another order of rows.
        self.shares_change = self.mixture is not None and self.mixture.shares_change
        # (epoch, plan) of the last call: callers ask for the same one several times
        self._last_plan: tuple[int, RowPlan] | None = None

    @classmethod
    def of(
        cls, settings: TextSettings, data_path: Sequence[str | Source], encoder: DocumentEncoder, **options: Any
    ) -> Self:
        """The data that a command's settings ask for. options: arguments that are no flags."""
        flags = {name: getattr(settings, name) for name in FLAGS if hasattr(settings, name)}
        return cls(data_path, encoder, settings, **flags, **options)

    def _lengths(self, encoder: DocumentEncoder, documents: Ints) -> Ints:
        """Tokens of some documents; of conversations those in a row, since what exceeds it is cut off."""
        lengths = np.diff(self.store.offsets)[documents]
        return lengths if encoder.can_hold_out_part else np.minimum(lengths, self.max_seq_len)

    def split(self, encoder: DocumentEncoder, fraction: float) -> tuple[Ints, int | None]:
        """(documents that are held out whole, the one whose end is held out), see `split_of`."""
        stores = self.stores if self.sources[0].shares is not None else []
        source = np.searchsorted(np.cumsum([len(store) for store in stores]), self.documents, side="right")
        hashes = self.store.doc_hash[self.documents]
        # Texts that differ in line ends or outer blanks stay together.
        _, text = np.unique(self.store.copy_hash[self.documents], return_inverse=True)
        lowest = np.full(len(text), np.iinfo(np.uint64).max)
        np.minimum.at(lowest, text, hashes)
        lengths = self._lengths(encoder, self.documents)
        whole, longest = split_of(lowest[text], lengths, source, fraction, encoder.can_hold_out_part)
        return self.documents[whole], None if longest is None else int(self.documents[longest])

    def _hold_out(self, encoder: DocumentEncoder, fraction: float) -> Ints:
        """Take documents out of the training ones, and return them. Errors: DataError if these are none or all."""
        documents, hashes = self.documents, self.store.doc_hash[self.documents]
        whole, self.split_document = self.split(encoder, fraction)
        self.held_out_part = self.split_document
        if self.split_document is None and len(whole) in (0, len(hashes)):
            lowest = np.unique(hashes)[:2] / 2.0**64
            # Between the first two, one is held out.
            advice = f"give {lowest.mean():.3g}" if len(lowest) > 1 else "add other texts"
            raise DataError(
                f"--val_fraction {fraction} holds out {len(whole)} of {counted(len(hashes), 'text')}, by their hashes; "
                f"{advice}, or name validation texts by --val_path"
            )
        n_tokens = int(self._lengths(encoder, documents).sum())
        tokens = int(self._lengths(encoder, whole).sum())
        held_out, self.documents = whole, np.setdiff1d(documents, whole, assume_unique=True)
        what = [counted(len(whole), "whole text")] if len(whole) else []
        if self.split_document is not None:
            self.store = with_last_part(self.store, self.split_document, encoder, round(fraction * n_tokens - tokens))
            self.documents += self.documents > self.split_document
            held_out = np.append(whole + (whole > self.split_document), self.split_document + 1)
            what.append("the end of the longest")
            tokens = int(self._lengths(encoder, held_out).sum())
        elif not np.array_equal(is_low(hashes, fraction), np.isin(documents, whole)):
            self.held_out_part = "whole texts"
        self.notices.append(
            f"note: held out: {' and '.join(what)}, {counted(tokens, 'token')} ({tokens / n_tokens:.1%})"
        )
        return np.sort(held_out)

    def _set_val(self, store: Documents, documents: Ints, what: str, remedy: str) -> None:
        """Set the validation documents. Errors: DataError if they have no targets."""
        self.val_store, self.val_documents = store, documents
        targets = self._targets if store is self.store else self._targets_of(store)
        if not targets[documents].any():
            raise DataError(f"{what}: {self.nothing_to_evaluate}, so there is no loss to measure; {remedy}")

    @property
    def validation_fingerprint(self) -> str:
        """The same on all ranks, but a resume may have other validation data. "": there is none."""
        return "" if self.val_store is None else self.val_store.fingerprint[:16]

    def _warn_of_overlap(self, val_store: TokenStore, what: str, allow_overlap: bool) -> None:
        """Warn of validation documents that are also in the training data. Errors: DataError if all of them are."""
        shared = int(np.isin(val_store.copy_hash, self.store.copy_hash[self.documents]).sum())
        total = len(val_store)
        if shared == total and not allow_overlap:
            raise DataError(
                f"{what}: all of it ({counted(total, 'document')}) is in the training data too, so its loss would say nothing "
                "about new text; name other documents, hold some out with --val_fraction, or pass --allow_val_overlap 1"
            )
        if shared:
            self.notices.append(
                f"warning: {shared / total:.1%} of the validation documents ({shared:,} of {total:,}) are in the "
                "training data too, as exact copies; the model may memorise them, which makes the validation loss too low"
            )

    @cached_property
    def _targets(self) -> Ints:
        return self._targets_of(self.store)

    def _targets_of(self, store: Documents) -> Ints:
        """uint32: trained tokens of each document, the unit of shares. Truncated documents count what is left."""
        targets = target_counts(store)
        is_cut = not self.pack or self.long_documents == "truncate"
        return np.minimum(targets, self.max_seq_len - 1) if is_cut else targets

    def _epoch_plan(self, documents: Ints, epoch: int, trained_pairs: Ints | None = None) -> RowPlan:
        """The rows of some documents. epoch: seeds the random numbers, with the seed. trained_pairs: see EpochPlan."""
        layout = self.max_seq_len, self.seed, epoch, self.pack, self.long_documents
        return EpochPlan(self.store.offsets, *layout, documents, trained_pairs=trained_pairs)

    def plan(self, epoch: int) -> RowPlan:
        """The rows of `epoch`, the same on every rank. Errors: DataError if no document can be trained.

        If `is_one_plan`, the whole run is epoch 0, see Mixture.plan.
        """
        if self._last_plan is None or self._last_plan[0] != epoch:
            # Freed before the next one is built: two would take twice the memory.
            self._last_plan = None
            plan = self._epoch_plan(self.documents, epoch) if self.mixture is None else self.mixture.plan(epoch)
            self._last_plan = (epoch, plan)
        plan = self._last_plan[1]
        if not plan.n_rows:
            lower = ": lower --val_fraction" if self.val_fraction else ""
            raise DataError(f"{', '.join(source.name for source in self.sources)}: {self.nothing_to_train}{lower}")
        return plan

    def assembler(self, n_rows: int = 0) -> Assembler:
        """Builds the batches of a plan; see Assembler."""
        return Assembler(self.store, n_rows, self.target_filter)

    def layout(self) -> dict[str, object]:
        """Settings that decide, besides the data, which document is in which row: a resume must not change them."""
        names = ("max_seq_len", "seed", "pack", "long_documents", "val_fraction")
        layout: dict[str, object] = {name: getattr(self, name) for name in names}
        return layout | self.part_layout | (self.mixture.layout() if self.mixture is not None else {"shares": []})

    def sources_of_epoch(self, epoch: int) -> list[dict[str, Any]]:
        """For the metrics line of a run, per source: paths, documents, and its share of the trained tokens, tokens and passes
        in an epoch, or in the run if that is one plan.

        Paths without shares are one source.
        """
        plan = self.plan(epoch)
        trained = plan.source_targets(plan.n_rows)
        documents, pass_targets = [self.documents], trained
        if self.mixture is not None:
            documents, pass_targets = self.mixture.documents, self.mixture.pass_targets
        sources = []
        for source, of_source, full, tokens in zip(self.sources, documents, pass_targets, trained, strict=True):
            figures = {"share": tokens / max(sum(trained), 1), "tokens": tokens, "passes": tokens / max(full, 1)}
            sources.append({"paths": source.paths, "documents": len(of_source), **figures})
        return sources

    def mixture_report(self, epoch: int) -> list[str]:
        """Lines with each source's share in an epoch, or in the run if that is one plan."""
        if self.mixture is None:
            return []
        of_run = " of the run" if self.is_one_plan else ""
        lines = []
        requested = zip(self.sources, self.mixture.shares, self.mixture.curves, strict=True)
        for planned, (source, share, curve) in zip(self.sources_of_epoch(epoch), requested, strict=True):
            course = f": {curve.text()}" if len(curve.points) > 1 else ""
            lines.append(
                f"{source.name}: {planned['share']:.2%} of the trained tokens{of_run} (requested {share:.2%}{course}), "
                f"{counted(planned['tokens'], 'token')}, {planned['passes']:.2f} passes"
            )
            if abs(planned["share"] - share) > SHARE_TOLERANCE:
                lines.append(
                    f"warning: {source.name} does not get its share: an epoch takes whole documents, and the sources have too "
                    "little text, or too long documents: cut these into shorter ones, or add :x2 to a share and give --max_updates"
                )
        return lines

    def tokens_of_sources(self, epoch: int, row: int) -> list[tuple[str, int, float]]:
        """(name, tokens, passes) of each source with a share, trained so far at row `row` of `epoch`."""
        if self.mixture is None:
            return []
        # If the whole run is one plan, epoch 1 starts at its planned end.
        targets = np.array(self.mixture.trained_before(epoch))
        if row:
            targets += self.plan(epoch).source_targets(row)
        of_sources = zip(self.sources, targets.tolist(), self.mixture.pass_targets, strict=True)
        return [(source.name, tokens, tokens / full) for source, tokens, full in of_sources]

    def bytes_per_target(self) -> float:
        """UTF-8 bytes of text per target, of the validation documents if there are any."""
        store, documents = self.store, self.documents
        if self.val_store is not None and self.val_documents is not None:
            store, documents = self.val_store, self.val_documents
        n_bytes = int(store.text_bytes[documents].sum(dtype=np.int64))
        targets = int(target_counts(store)[documents].sum(dtype=np.int64))
        return n_bytes / max(targets, 1)

    def truncation_report(self, plan: RowPlan) -> list[str]:
        """A line on the tokens that --pack 0 or --long_documents truncate leave out of an epoch, if any."""
        if self.mixture is not None or (self.pack and self.long_documents == "split"):
            return []
        trained = plan.row_targets(0, plan.n_rows)
        total = int(target_counts(self.store)[self.documents].sum(dtype=np.int64))
        if trained >= total:
            return []
        why = "--pack 0" if not self.pack else "--long_documents truncate"
        return [
            f"note: {total - trained:,} of {counted(total, 'token')} ({1 - trained / total:.1%}) are not trained on: {why} cuts "
            "off what exceeds --max_seq_len"
        ]

    def validation(self) -> "ValidationBatches | None":
        """ValidationBatches over whole documents (long ones in pieces, long conversations truncated), or None."""
        if self.val_store is None or self.val_documents is None:
            return None
        return ValidationBatches(self.val_store, self.val_documents, self.max_seq_len, self.target_filter)


def is_low(hashes: Ints, fraction: float) -> Bools:
    """True for the lowest `fraction` of all hashes, which are uniform over 64-bit numbers."""
    assert 0 <= fraction < 1
    return np.asarray(hashes < np.uint64(int(fraction * 2**64)))


def split_of(hashes: Ints, lengths: Ints, source: Ints, fraction: float, can_divide: bool) -> tuple[Bools, int | None]:
    """(which documents are held out whole, the one whose end is held out or None), so that about `fraction` of the tokens is.

    By hash, the same documents stay out however the file is ordered or extended, and copies of a text stay together. If these
    are far from the share, or all of a source, short ones stay out, and the end of the longest makes up the share; if it is too
    short, or copied, or not can_divide, whole texts of the lowest hashes are held out until the share is reached.
    """
    asked = fraction * lengths.sum()
    by_hash = is_low(hashes, fraction)
    # in a source of which nothing would be left
    is_lost = np.bincount(source, ~by_hash)[source] == 0
    if asked / MAX_RATIO <= lengths[by_hash].sum() <= asked * MAX_RATIO and not is_lost.any():
        return by_hash, None
    _, text, copies = np.unique(hashes, return_inverse=True, return_counts=True)
    if can_divide:
        # The end of one with copies would be trained.
        single = lengths * (copies[text] == 1)
        longest = int(single.argmax())
        whole = by_hash & ~is_lost & (lengths * MAX_RATIO <= asked) & (len(lengths) >= MIN_DOCUMENTS)
        whole[longest] = False
        n_whole = lengths[whole].sum()
        end = min(asked - n_whole, MAX_PART * single[longest])
        if len(lengths) == 1 or end >= max(asked / MAX_RATIO - n_whole, MIN_PART_TOKENS):
            return whole, longest
    by_length = fitting_texts(hashes, lengths, source, fraction)
    return by_length if by_length.any() else by_hash, None


def fitting_texts(hashes: Ints, lengths: Ints, source: Ints, fraction: float) -> Bools:
    """The documents of the lowest hashes that have about `fraction` of the tokens, without longer ones than these."""
    asked = fraction * lengths.sum()
    _, text = np.unique(hashes, return_inverse=True)
    # tokens of each text, copies included, in the order of the hashes
    of_text = np.bincount(text, lengths)
    # The longest of each source is trained.
    longest_last = np.lexsort((hashes, lengths, source))
    of_text[text[longest_last[np.diff(source, append=-1) != 0]]] = np.inf
    least = of_text.min()
    fitting = np.flatnonzero(of_text <= (least if asked < least <= asked * MAX_RATIO else asked))
    sums = np.cumsum([0.0, *of_text[fitting]])
    # Where one text or its copies are nearly all, the others are not given up.
    left = min(asked, max(fraction, 2 / 3) * sums[-1])
    n_texts = int(np.abs(sums - left).argmin())
    return np.isin(text, fitting[:n_texts])


def with_last_part(store: Documents, document: int, encoder: DocumentEncoder, asked: int) -> Documents:
    """The store with a document as two, the second of about `asked` tokens: from a line end on, if one is near.

    A worker process opens the store from its folders, as it is, and reads only tokens, at positions that recipes give.
    """
    split = copy.copy(store)
    begin, end = store.offsets[document : document + 2].tolist()
    cut = end - min(asked, round(MAX_PART * (end - begin)))
    # Not so far that the part is far from what is asked for
    near = store.tokens[cut : cut + (end - cut - 1) // MAX_RATIO]
    line_ends = [token_id for token_id in np.unique(near).tolist() if encoder.ends_line(token_id)]
    after = np.flatnonzero(np.isin(near, line_ends)) + 1
    cut += int(after[0]) if len(after) else 0
    n_bytes = int(store.text_bytes[document])
    held_out_bytes = round(n_bytes * (end - cut) / (end - begin))
    # A tokenizer that changes a text, as by lower case, decodes to another number of bytes.
    if encoder.round_trip(PROBE) == PROBE:
        held_out_bytes = min(len(encoder.decode(store.tokens[cut:end].tolist()).encode()), n_bytes)
    split.offsets = np.insert(store.offsets, document + 1, cut)
    split.text_bytes = np.insert(store.text_bytes, document + 1, held_out_bytes)
    split.text_bytes[document] -= held_out_bytes
    split.doc_hash = np.insert(store.doc_hash, document + 1, store.doc_hash[document])
    split.copy_hash = np.insert(store.copy_hash, document + 1, store.copy_hash[document])
    return split


class ValidationBatches:
    """Batches of EVAL_ROWS rows in a fixed order, the last one padded.

    n_bytes: UTF-8 bytes of the documents' texts; None if only part of the text is predicted. target_filter: see Corpus.
    """

    def __init__(self, store: Documents, documents: Ints, max_seq_len: int, target_filter: TargetFilter | None) -> None:
        cut = "split" if target_filter is None else "truncate"
        self.plan = EpochPlan(
            store.offsets, max_seq_len, seed=0, epoch=0, long_documents=cut, documents=documents, shuffle=False
        )
        # first row of each batch
        self.first_rows = range(0, self.plan.n_rows, EVAL_ROWS)
        self.assembler = Assembler(store, EVAL_ROWS, target_filter)
        self.n_bytes = int(store.text_bytes[documents].sum(dtype=np.int64)) if target_filter is None else None

    def __len__(self) -> int:
        return len(self.first_rows)

    def __getitem__(self, i: int) -> Batch:
        first = self.first_rows[i]
        return self.assembler[self.plan.recipe(range(first, min(first + EVAL_ROWS, self.plan.n_rows)))]
