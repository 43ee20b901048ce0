"""The data of a run: training documents, held-out documents, and the plan of each epoch."""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from common.errors import DataError
from common.wording import counted
from dataset.loader import Assembler, Batch, TargetFilter
from dataset.mixture import Mixture
from dataset.packing import EpochPlan, RowPlan, all_documents, target_counts
from dataset.reading.file_kinds import choose_files, is_address, kind_of, notice_of_held_out
from dataset.reading.settings import OFF
from dataset.shares import Source, group_sources, name_of
from dataset.store.deduplicate import check_library, copies_among
from dataset.store.format import ConcatStore, DigestCheck, Documents, Ints, TokenStore
from dataset.store.token_store import StoreOptions, open_or_build
from dataset.tokenizing.encoder import DocumentEncoder

# largest error of a share without a warning: whole documents seldom add up to it exactly
SHARE_TOLERANCE = 0.02
# Rows of a validation batch: fixed, so that the figures do not depend on the training batch.
EVAL_ROWS = 16
# Hashes that put a document on a known side of `split_by_hash`: the smallest is held out, the largest is trained.
HELD_OUT_HASH, TRAINED_HASH = 0, (1 << 64) - 1
# Of fewer documents the end of the longest (at most MOST_OF_TEXT of it, at least FEWEST_TOKENS) is held out, if hashes hold out
# FAR times the share that is asked for, or 1 / FAR of it.
FEWEST_DOCUMENTS, MOST_OF_TEXT, FEWEST_TOKENS, FAR = 200, 0.9, 16, 2


def notices_of_paths(
    paths: Sequence[str], text_suffixes: Sequence[str] | None = None, cache_dir: str | None = None
) -> list[str]:
    """Notices on --data_path: files named several times, and files left out for their kind."""
    # An address is one file, which some servers would send again.
    local_paths = [path for path in paths if not is_address(path)]
    # Walked once: a folder of many files takes a while.
    choices = {path: choose_files(path, text_suffixes, cache_dir) for path in local_paths}
    lines = []
    # Resolved, so that a file and a link to it count as one.
    times = Counter(str(file.resolve()) for path in local_paths for file in choices[path][0])
    for name, count in times.items():
        if count > 1:
            lines.append(
                f"warning: --data_path names {name} {count} times: without --deduplicate its documents are repeated that "
                "often in an epoch"
            )
    lines += notice_of_held_out([file for read, _, _ in choices.values() for file in read])
    for path, (read, left_out, foreign) in choices.items():
        if foreign:
            shown = ", ".join(map(str, foreign[:4])) + f" and {len(foreign) - 4:,} more" * (len(foreign) > 4)
            lines.append(
                f"{path}: packages, build output and minified files left out: {shown}; to read one, name its own path"
            )
        if left_out:
            suffixes = ", ".join(sorted({kind_of(file).suffix for file in read}))
            lines.append(
                f"{path}: {counted(len(read), 'file')} read ({suffixes}), {len(left_out):,} of other kinds (such as "
                f"{left_out[0].name}) left out; name files by their own paths to read others"
            )
    return lines


class Corpus:
    """Tokenises new data, opens the token stores and plans epochs.

    data_path: paths, each with or without a share (`a.jsonl:0.7`), or sources. val_path: one or several paths of
    separate validation documents; val_fraction: share of the documents that is held out by hash. deduplicate: as the
    flag; documents of val_path keep their copies, so that their loss stays comparable. epochs, n_rows: see Mixture.
    `store_options` go to `open_or_build`.
    `notices`: lines on the data for the user.
    Errors: DataError for missing or faulty files and shares, if nothing is left to train on or to evaluate, and if all
    validation documents are trained too, unless `allow_val_overlap`.
    """

    # error texts for epochs without rows and for validation documents without targets
    nothing_to_train = "no document of two tokens or more to train on"
    nothing_to_evaluate = "no document of two tokens or more"
    # masks the targets of a batch that are not trained; None: all are trained
    target_filter: TargetFilter | None = None

    def __init__(
        self,
        data_path: Sequence[str | Source],
        encoder: DocumentEncoder,
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
        **store_options: Unpack[StoreOptions],
    ) -> None:
        sources = group_sources(data_path)
        check_library(deduplicate)
        self.source_names = [name_of(source.paths) for source in sources]
        self.paths_of_sources = [source.paths for source in sources]
        stores = [open_or_build(paths, encoder, **store_options) for paths in self.paths_of_sources]
        self.stores = stores
        # The document that is split in two, to hold out its last part and nothing else
        self.split_document: int | None = None
        if val_fraction and not val_path and encoder.can_hold_out_part:
            self.split_document = document_to_split(stores, val_fraction)
        if self.split_document is not None:
            self.stores = with_last_part(stores, self.split_document, encoder, val_fraction)
        # Earlier runs split single texts alone: one that held out whole texts of several does not go on with a part.
        self.part_layout = {"held-out part": self.split_document} if sum(map(len, stores)) > 1 else {}
        self.store: TokenStore | ConcatStore = ConcatStore(self.stores) if len(stores) > 1 else self.stores[0]
        self.fingerprint = self.store.fingerprint
        self.max_seq_len = max_seq_len
        self.seed = seed
        self.pack = pack
        self.long_documents = long_documents
        self.val_fraction = val_fraction
        paths = [path for source in sources for path in source.paths]
        self.notices = notices_of_paths(paths, store_options.get("text_suffixes"), store_options.get("cache_dir"))
        # numbers of the training documents
        self.documents = all_documents(self.store)
        if deduplicate != OFF:
            is_copy, self.fingerprint, lines = copies_among(
                stores, self.paths_of_sources, encoder, deduplicate, **store_options
            )
            self.notices += lines
            if is_copy.any():
                if self.split_document is not None:
                    # Both parts of a document are copies, or neither.
                    is_copy = np.insert(is_copy, self.split_document, is_copy[self.split_document])
                self.documents = self.documents[~is_copy]
        self.notices += [line for store in stores for line in store.report()]
        # validation documents and their store, with --val_fraction `store` itself; None: no validation
        self.val_documents: Ints | None = None
        self.val_store: Documents | None = None
        if val_path:
            paths = [val_path] if isinstance(val_path, str) else list(val_path)
            val_store = open_or_build(paths, encoder, **store_options)
            self.notices += [f"--val_path: {line}" for line in val_store.report()]
            self._set_val(val_store, all_documents(val_store), f"--val_path {name_of(paths)}", "name other documents")
            self._warn_of_overlap(val_store, f"--val_path {name_of(paths)}", allow_val_overlap)
        elif val_fraction:
            hashes = np.unique(self.store.doc_hash[self.documents]) / 2.0**64
            self.documents, held_out = split_by_hash(self.store, self.documents, val_fraction)
            if not len(self.documents) or not len(held_out):
                # Between the first two, one is held out.
                advice = f"give {hashes[:2].mean():.3g}" if len(hashes) > 1 else "add other texts"
                raise DataError(
                    f"--val_fraction {val_fraction} holds out {len(held_out)} of {counted(len(self.documents) + len(held_out), 'text')}, by "
                    f"their hashes; {advice}, or name validation texts by --val_path"
                )
            if self.split_document is not None:
                part = int(np.diff(self.store.offsets)[held_out].sum())
                self.notices.append(
                    f"note: too few texts to hold out whole ones: held out is the end of the longest, {counted(part, 'token')} "
                    f"({part / len(self.store.tokens):.1%})"
                )
            self._set_val(self.store, held_out, f"what --val_fraction {val_fraction} holds out", "raise --val_fraction")
        # Draws documents by the shares of the sources; None: no shares. After the split: held-out documents count
        # towards no share.
        self.mixture: Mixture | None = None
        # The whole run is one plan: a share changes over it, or a source may be repeated.
        self.is_one_plan = False
        # A share changes over the run, so another length would give another order of rows.
        self.shares_change = False
        if sources[0].shares is not None:
            bounds = np.cumsum([0, *map(len, self.stores)]).tolist()
            self.mixture = Mixture(
                self.store, sources, self.documents, bounds, self._epoch_plan, self._targets, seed, epochs, n_rows
            )
            self.is_one_plan, self.shares_change = self.mixture.is_one_plan, self.mixture.shares_change
        # (epoch, plan) of the last call: callers ask for the same one several times
        self._last_plan: tuple[int, RowPlan] | None = None

    def _set_val(self, store: Documents, documents: Ints, what: str, remedy: str) -> None:
        """Set the validation documents. Errors: DataError if they have no targets."""
        self.val_store, self.val_documents = store, documents
        if not self._has_targets(store, documents):
            raise DataError(f"{what}: {self.nothing_to_evaluate}, so there is no loss to measure; {remedy}")

    @property
    def validation_fingerprint(self) -> str:
        """The same on all ranks, but a resume may have other validation data. "": there is none."""
        return "" if self.val_store is None else self.val_store.fingerprint[:16]

    def _warn_of_overlap(self, val_store: TokenStore, what: str, allow_overlap: bool) -> None:
        """Warn of validation documents that are also in the training data. Errors: DataError if all of them are."""
        shared = int(np.isin(val_store.doc_hash, self.store.doc_hash[self.documents]).sum())
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

    def _has_targets(self, store: Documents, documents: Ints) -> bool:
        """True if these documents have any target."""
        return bool(target_counts(store)[documents].any())

    @property
    def _targets(self) -> Ints:
        """Trained tokens of each document of the store, the unit of shares. Truncated documents count what is left."""
        targets = target_counts(self.store)
        is_cut = not self.pack or self.long_documents == "truncate"
        return np.minimum(targets, self.max_seq_len - 1) if is_cut else targets

    def _epoch_plan(self, documents: Ints, epoch: int, trained_pairs: Ints | None = None) -> RowPlan:
        """The rows of some documents. epoch: seeds the random numbers, with the seed. trained_pairs: see EpochPlan."""
        return EpochPlan(
            self.store.offsets,
            self.max_seq_len,
            self.seed,
            epoch,
            pack=self.pack,
            long_documents=self.long_documents,
            documents=documents,
            trained_pairs=trained_pairs,
        )

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
            raise DataError(f"{', '.join(self.source_names)}: {self.nothing_to_train}{lower}")
        return plan

    def assembler(self, n_rows: int = 0) -> Assembler:
        """Builds the batches of a plan; see Assembler."""
        return Assembler(self.store, n_rows, self.target_filter)

    def digest_check(self) -> DigestCheck:
        """Checks the tokens of all stores of this run during training."""
        stores = [*self.stores]
        # Held-out documents are in these stores already.
        if isinstance(self.val_store, TokenStore) and self.val_store is not self.store:
            stores.append(self.val_store)
        return DigestCheck(stores)

    def layout(self) -> dict[str, object]:
        """Settings that decide, besides the data, which document is in which row: a resume must not change them."""
        layout: dict[str, object] = {
            "max_seq_len": self.max_seq_len,
            "seed": self.seed,
            "pack": self.pack,
            "long_documents": self.long_documents,
            "val_fraction": self.val_fraction,
        }
        return layout | self.part_layout | (self.mixture.layout() if self.mixture is not None else {"shares": []})

    def sources_of_epoch(self, epoch: int) -> list[dict[str, Any]]:
        """For the record of a run, per source: paths, documents, and its share of the trained tokens, tokens and passes
        in an epoch, or in the run if that is one plan.

        Paths without shares are one source.
        """
        plan = self.plan(epoch)
        given = plan.source_targets(plan.n_rows)
        documents, pass_targets = [self.documents], given
        if self.mixture is not None:
            documents, pass_targets = self.mixture.documents, self.mixture.pass_targets
        sources = []
        for paths, of_source, full, tokens in zip(self.paths_of_sources, documents, pass_targets, given, strict=True):
            share = tokens / max(sum(given), 1)
            figures = {"share": share, "tokens": tokens, "documents": len(of_source), "passes": tokens / max(full, 1)}
            sources.append({"paths": paths, **figures})
        return sources

    def mixture_report(self, epoch: int) -> list[str]:
        """Lines with each source's share in an epoch, or in the run if that is one plan."""
        if self.mixture is None:
            return []
        of_run = " of the run" if self.is_one_plan else ""
        lines = []
        requested = zip(self.mixture.shares, self.mixture.curves, strict=True)
        for name, got, (share, curve) in zip(self.source_names, self.sources_of_epoch(epoch), requested, strict=True):
            course = f": {curve.text()}" if len(curve.points) > 1 else ""
            lines.append(
                f"{name}: {got['share']:.2%} of the trained tokens{of_run} (requested {share:.2%}{course}), "
                f"{counted(got['tokens'], 'token')}, {got['passes']:.2f} passes"
            )
            if abs(got["share"] - share) > SHARE_TOLERANCE:
                lines.append(
                    f"warning: {name} does not get its share: an epoch takes whole documents, and the sources have too little "
                    "text, or too long documents: cut these into shorter ones, or add :x2 to a share and give --max_updates"
                )
        return lines

    def tokens_of_sources(self, epoch: int, row: int) -> list[tuple[str, int, float]]:
        """(name, tokens, passes) of each source with a share, trained so far at row `row` of `epoch`."""
        if self.mixture is None:
            return []
        # If the whole run is one plan, epoch 1 starts at its planned end.
        targets = self.mixture.trained_before(epoch)
        if row:
            in_epoch = self.plan(epoch).source_targets(row)
            targets = [before + more for before, more in zip(targets, in_epoch, strict=True)]
        of_sources = zip(self.source_names, targets, self.mixture.pass_targets, strict=True)
        return [(name, tokens, tokens / full) for name, tokens, full in of_sources]

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


def split_by_hash(store: Documents, documents: Ints, fraction: float) -> tuple[Ints, Ints]:
    """(training, validation): the numbers of the documents on each side, in their order.

    A document is held out iff its hash is in the lowest `fraction` of all hashes: the same documents stay out however
    the file is ordered or extended, and copies of a text stay together.
    """
    assert 0 <= fraction < 1
    # Hashes are uniform over 64-bit numbers, so about `fraction` of them are below this one.
    is_held_out = store.doc_hash[documents] < np.uint64(int(fraction * 2**64))
    return documents[~is_held_out], documents[is_held_out]


def document_to_split(stores: Sequence[TokenStore], fraction: float) -> int | None:
    """The longest text, if hashes would hold out nothing, all, or far from `fraction` of few texts; else None."""
    lengths = np.concatenate([np.diff(store.offsets) for store in stores])
    hashes = np.concatenate([store.doc_hash for store in stores])
    longest = int(lengths.argmax())
    if len(lengths) == 1:
        return longest
    asked = fraction * lengths.sum()
    held_out = lengths[hashes < np.uint64(int(fraction * 2**64))].sum()
    is_far = held_out == lengths.sum() or not asked / FAR <= held_out <= asked * FAR
    is_near = min(asked, MOST_OF_TEXT * lengths[longest]) >= max(asked / FAR, FEWEST_TOKENS)
    # Copies of it are trained.
    is_copied = (hashes == hashes[longest]).sum() > 1
    return longest if len(lengths) < FEWEST_DOCUMENTS and is_far and is_near and not is_copied else None


def with_last_part(
    stores: Sequence[TokenStore], document: int, encoder: DocumentEncoder, val_fraction: float
) -> list[TokenStore]:
    """The stores with a document, numbered over all of them, as two; `split_by_hash` holds out the second, and only that.

    The second has about the last `val_fraction` of all tokens, and starts after a line end if there is one. A worker
    process opens the stores from their folders, as they are, and reads only tokens, at places that recipes give.
    """
    n_tokens = sum(len(store.tokens) for store in stores)
    split = [copy.copy(store) for store in stores]
    for store in split:
        store.doc_hash = np.full(len(store), TRAINED_HASH, np.uint64)
    bounds = np.cumsum([0, *map(len, stores)])
    number = int(np.searchsorted(bounds, document, side="right")) - 1
    store, document = split[number], document - int(bounds[number])
    begin, end = store.offsets[document : document + 2].tolist()
    cut = end - round(min(val_fraction * n_tokens, max(val_fraction, MOST_OF_TEXT) * (end - begin)))
    last_part = store.tokens[cut:end]
    line_ends = [token_id for token_id in np.unique(last_part).tolist() if encoder.ends_line(token_id)]
    places = np.flatnonzero(np.isin(last_part[:-2], line_ends))
    cut += int(places[0]) + 1 if len(places) else 0
    n_bytes = int(store.text_bytes[document])
    held_out_bytes = round(n_bytes * (end - cut) / (end - begin))
    # A tokenizer that changes a text, as by lower case, decodes to another number of bytes.
    probe = "A  b\t,\n 中，ﬁé\U00013000"
    if encoder.decode(encoder.encode([probe])[0]) == probe:
        held_out_bytes = min(len(encoder.decode(store.tokens[cut:end].tolist()).encode()), n_bytes)
    store.offsets = np.insert(store.offsets, document + 1, cut)
    store.text_bytes = np.insert(store.text_bytes, document + 1, held_out_bytes)
    store.text_bytes[document] -= held_out_bytes
    store.doc_hash = np.insert(store.doc_hash, document + 1, HELD_OUT_HASH)
    return split


class ValidationBatches:
    """Batches of EVAL_ROWS rows in a fixed order, the last one padded.

    n_bytes: UTF-8 bytes of the documents' texts; None if only part of the text is predicted. target_filter: see Corpus.
    """

    n_bytes: int | None

    def __init__(self, store: Documents, documents: Ints, max_seq_len: int, target_filter: TargetFilter | None) -> None:
        self.plan = EpochPlan(
            store.offsets,
            max_seq_len,
            seed=0,
            epoch=0,
            long_documents="split" if target_filter is None else "truncate",
            documents=documents,
            shuffle=False,
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
