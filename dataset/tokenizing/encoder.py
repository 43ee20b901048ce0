"""Text to token ids, the same way for every trainer and every tokenizer."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer

from common.errors import UserError, library_errors
from common.wording import announce
from dataset.arrays import Ints
from dataset.tokenizing.byte_level_bpe import GPT2, KNOWN_PATTERNS, LONGEST_WHOLE, WORD_PATTERNS, is_cut, parts_of
from dataset.tokenizing.plain_tokenizer import plain_tokenizer
from dataset.tokenizing.tokenizer_files import SAMPLE, check_readable, load_by_transformers, remove_bos_template

if TYPE_CHECKING:
    from fastokens import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerBase


# Maximum characters of a part of a long text
PART_CHARACTERS = 1 << 18
# From this many on, the start of the faster tokenizer pays: 0.04 s, for 150,000 entries 1.8 s.
MANY_CHARACTERS = 1 << 20


class TooLongToEncode(UserError):
    """A text that cannot be encoded both exactly and in bounded memory."""


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """A Hugging Face tokenizer from a local folder, whose code is never run. Errors: ValueError if there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{path}: no such tokenizer folder; it has a tokenizer.json and its config")
    check_readable(folder)
    # For its users it is one.
    plain = cast("PreTrainedTokenizerBase | None", plain_tokenizer(folder))
    return load_by_transformers(folder) if plain is None else plain


class DocumentEncoder:
    """Encodes whole documents: BOS, the text's ids, EOS, never truncated.

    A literal BOS string at the start of a text, or EOS string at its end, is not doubled (MiniMind's files have them).
    Elsewhere the literal spelling of a special token is ordinary text, unless `parse_special_tokens` is set. A tokenizer
    without BOS or EOS adds none, and its own post-processor adds nothing.

    Works with a copy of the Rust tokenizer. A text of more than PART_CHARACTERS is encoded in parts, with the ids of the
    whole. Errors: ValueError for a tokenizer that is not purely Rust; TooLongToEncode for a text without a place to cut
    that is longer than LONGEST_WHOLE.
    """

    # What ends a document of a text file without --split_text, see `read_documents`.
    document_end: str | None = None
    # The last part of a single text can be held out for validation.
    can_hold_out_part = True
    # False: texts may lose case and spaces, as no figure counts their bytes.
    should_keep_text = True

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", parse_special_tokens: bool = False) -> None:
        self.parse_special_tokens = parse_special_tokens
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self._bos = str(tokenizer.bos_token) if self.bos_id is not None else None
        self._eos = str(tokenizer.eos_token) if self.eos_id is not None else None
        # for messages; that of a vocab.txt has none.
        self.name = f"the tokenizer {tokenizer.name_or_path}".strip()
        # No Rust tokenizer, or one with parts in Python (RoFormer)
        why = f"{type(tokenizer).__name__} runs Python code for each text; use a fast tokenizer, which is all in a tokenizer.json"
        with library_errors(f"{self.name}: {why}"):
            content: str = tokenizer.backend_tokenizer.to_str()
        self._backend = self._own_backend(content)
        spec = json.loads(content)
        # Only a Unigram has an id for unknown text, the others a token.
        unk_token = spec["model"].get("unk_token")
        self._unk_id = spec["model"].get("unk_id") if unk_token is None else self._backend.token_to_id(unk_token)
        self._cuts_long_texts = can_be_cut(spec, parse_special_tokens)
        self._can_be_fast = self._cuts_long_texts and is_plain_bpe(spec)
        # see use_fastokens
        self.fast: FastTokenizer | None = None
        # largest id + 1
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        # SHA-256 of everything that determines the ids of a text. Token stores and checkpoints record it: a change of the
        # contents or their order here would invalidate all existing ones.
        added = [(i, str(token), token.special) for i, token in sorted(tokenizer.added_tokens_decoder.items())]
        options = [self.bos_id, self.eos_id, self._bos, self._eos, parse_special_tokens, added]
        self.fingerprint = hashlib.sha256((json.dumps(options) + self._backend.to_str()).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, BOS and EOS included."""
        if sum(map(len, texts)) > MANY_CHARACTERS and self.fast is None:
            self.use_fastokens(texts)
        return [np.concatenate(list(self.encode_in_parts(text))).tolist() for text in texts]

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of the beginning of a document: BOS and the text, as in training, without EOS."""
        (ids,) = self.encode([text])
        return ids if self.eos_id is None else ids[:-1]

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, special tokens left out."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def round_trip(self, text: str) -> str:
        """What the ids of a text are decoded to, unknown tokens left out."""
        ids = [token_id for token_id in self._encode_whole(text).tolist() if token_id != self._unk_id]
        with library_errors(f"{self.name} cannot decode text"):
            return self._backend.decode(ids, skip_special_tokens=False)

    def ends_line(self, token_id: int) -> bool:
        """True if a line of a text ends with this token."""
        return self.decode([token_id]).endswith("\n")

    def body(self, text: str) -> str:
        """The text without literal BOS and EOS strings around it."""
        if self._bos:
            text = text.removeprefix(self._bos)
        return text.removesuffix(self._eos) if self._eos else text

    def encode_in_parts(self, text: str) -> Iterator[Ints]:
        """Yields the ids of one text in consecutive arrays: those of a long text are never held at once."""
        if self.bos_id is not None:
            yield np.array([self.bos_id])
        yield from self._body_in_parts(self.body(text))
        if self.eos_id is not None:
            yield np.array([self.eos_id])

    def use_fastokens(self, texts: Iterable[str]) -> None:
        """Encode with fastokens from now on, some ten times as fast, if it is installed, reads this tokenizer, and gives
        the ids of the tokenizers library for the first of these texts. A line tells of other ids."""
        if self.fast is None and self._can_be_fast:
            self.fast = fast_tokenizer(self._backend.to_str())
        left = SAMPLE
        for text in texts:
            if self.fast is None or left <= 0:
                break
            part = text[:left]
            left -= len(part)
            if not np.array_equal(self._encode_whole(part), self._by_library(part)):
                announce(
                    f"note: {self.name}: fastokens gives other ids for {part[:40]!r}, so tokenizers encodes, slowly"
                )
                self.fast = None

    def _body_in_parts(self, body: str) -> Iterator[Ints]:
        """Yields the ids of a text without BOS and EOS, cut where no token can cross."""
        parts = parts_of(body, PART_CHARACTERS) if self._cuts_long_texts else [body]
        for part in parts:
            if len(part) > LONGEST_WHOLE:
                raise TooLongToEncode(
                    f"{len(part):,} characters in which this tokenizer allows no cut; "
                    f"at most {LONGEST_WHOLE:,} can be encoded at once"
                )
            yield self._encode_whole(part)

    def _encode_whole(self, text: str) -> Ints:
        """The ids of a text without BOS and EOS."""
        if self.fast is not None:
            # What it refuses, if anything, the library may take.
            with contextlib.suppress(UserError), library_errors("fastokens"):
                # This call makes no Python object of an id, which would take twice the time.
                ids, _ = self.fast.encode_batch_flat([text], split_special_tokens=not self.parse_special_tokens)
                return np.frombuffer(ids, "<u4")
        return self._by_library(text)

    def _by_library(self, text: str) -> Ints:
        """By Hugging Face's code, the reference."""
        # Such as an unknown character where the vocabulary has no entry for it
        with library_errors(f"{self.name} cannot encode {text[:40]!r}"):
            # This call never starts the tokenizer's threads, about which a later fork would warn.
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, "<u4")

    def _own_backend(self, content: str) -> Tokenizer:
        """A copy of the Rust tokenizer, whose settings are independent of the original's."""
        backend = Tokenizer.from_str(content)
        remove_bos_template(backend, self._bos, self.bos_id)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not self.parse_special_tokens
        return backend

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes get the Rust tokenizer as text: its own pickling would lose `encode_special_tokens`.
        return {**self.__dict__, "_backend": self._backend.to_str(), "fast": self.fast is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._backend = self._own_backend(state["_backend"])
        self.fast = fast_tokenizer(state["_backend"]) if state["fast"] else None


# ----------------------------------------------------------------------------------------------- fastokens


def fast_tokenizer(content: str) -> "FastTokenizer | None":
    """The tokenizer of a tokenizer.json in fastokens; None if it cannot read it or is not installed."""
    # Processes share the cores already, and a fork would lose its threads.
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    with contextlib.suppress(ImportError, UserError), library_errors("fastokens"):
        from fastokens import Tokenizer

        return Tokenizer.from_json_str(content)
    return None


def is_plain_bpe(spec: dict[str, Any]) -> bool:
    """True if both libraries read this tokenizer.json, which can be cut, alike.

    They match added tokens with any of these flags differently, characters that the vocabulary lacks (without bytes), and GPT-2's
    pattern where it is a step of its own.
    """
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    has_flags = any(token[flag] for token in spec["added_tokens"] for flag in flags)
    steps = spec["pre_tokenizer"].get("pretokenizers", [spec["pre_tokenizer"]])
    has_bytes = any(step["type"] == "ByteLevel" for step in steps)
    has_gpt2 = any(step.get("pattern", {}).get("Regex") == GPT2 for step in steps)
    return spec["model"]["type"] == "BPE" and has_bytes and not has_flags and not has_gpt2


# --------------------------------------------------------------------------------------------- long texts in parts


def can_be_cut(spec: dict[str, Any], parse_special_tokens: bool) -> bool:
    """True if long texts may be cut for the tokenizer of this tokenizer.json."""
    for token in spec["added_tokens"]:
        # Such tokens are split off before a text is cut into pieces. One that spans a cut, or depends on its neighbours,
        # forbids cuts.
        if parse_special_tokens or not token["special"]:
            spans = any(is_cut(*pair) for pair in pairwise(token["content"]))
            if spans or token["rstrip"] or token["single_word"]:
                return False
    normalizer = (spec["normalizer"] or {"type": "none"})["type"]
    step = spec["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if normalizer == "BertNormalizer":
        # The second step cuts words that are too long.
        return [step["type"] for step in steps] in (["BertPreTokenizer"], ["BertPreTokenizer", "Split"])
    if normalizer not in ("none", "NFC") or spec["model"].get("dropout"):
        return False
    # Some step has to split words.
    splits_words = any(step.get("use_regex") or step.get("pattern", {}).get("Regex") in WORD_PATTERNS for step in steps)
    return splits_words and all(map(_is_known, steps))


def _is_known(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        # Each part would get a prefix.
        return not step["add_prefix_space"]
    if step["type"] == "Split":
        return step["behavior"] in ("Isolated", "Removed") and step["pattern"].get("Regex") in KNOWN_PATTERNS
    return bool(step["type"] == "Digits")
