"""Reading any text with the networks of an ELECTRA: the generator replaces some words, the discriminator doubts some.

A text that is longer than the examples of the training is read in windows of their length. They overlap by half. For
each token the window with the most context around it counts.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ElectraForMaskedLM, ElectraForPreTraining, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from common.arrays import Array
from common.errors import UserError, user_errors
from dataset.reading.file_kinds import expanded
from dataset.store.interface import Ints
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from dataset.tokenizing.vocabulary import MOST_UNKNOWN, check_ids_fit, check_size
from dataset.tokenizing.windows import window_of_tokens, windows_of
from dataset.tokenizing.words import words_of
from model.electra.detection import LENGTH, Draws, Passage, Word, draws_of, measured_threshold, usual_threshold
from model.electra.masking import IGNORE, mask_count, mask_tokens
from model.electra.sampling import sample, to_draw_from
from model.electra.saved_network import load_network
from trainer.encoder_folder import find_model

# Windows that are computed at once.
ROWS = 16
# CLS and SEP of a window, and one token at least.
LEAST_LENGTH = 3
# What helps where the tokenizer in a folder is not that of its network.
OTHER_TOKENIZER = "copy the files of the tokenizer that it was trained with into its folder"
# The generator of a run lies beside its discriminator.
GENERATOR = "generator"


class Detector:
    """A discriminator with its tokenizer, and its generator where there is one. length: positions of a window."""

    def __init__(
        self,
        discriminator: ElectraForPreTraining,
        generator: ElectraForMaskedLM | None,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
    ) -> None:
        """Errors: ValueError for a tokenizer that cannot cut a text into words."""
        self.discriminator = discriminator.to(device).eval()  # type: ignore[arg-type]  # transformers wraps it
        self.generator = None if generator is None else generator.to(device).eval()  # type: ignore[arg-type]
        self.tokenizer = tokenizer
        self.encoder = SentenceEncoder(tokenizer)
        self.device = device
        self.length = length_of(discriminator.config)
        self.draws = Draws() if generator is None else draws_of(generator.config)

    def passage(self, text: str, share: float = 0.0, seed: int = 0, threshold: float | None = None) -> Passage:
        """What the discriminator makes of a text. share: of the tokens that are replaced before; 0: none. threshold: from which
        probability on a word is doubted (default: the measured one, or the usual one for this text).

        Errors: UserError for a text without words, and where the weights give no numbers.
        """
        with user_errors():
            tokens = self.encoder.encode_in_words(checked(text))
        if not len(tokens.ids):
            raise UserError("the text has no word that the tokenizer knows of")
        ids = self.with_replaced(tokens.ids, share, seed) if share else tokens.ids
        probabilities = self.probabilities(ids)
        words = []
        in_text, after = words_of(text, tokens)
        for word in in_text:
            begin, end = word.tokens
            shown = word.text
            original = None
            if (ids[begin:end] != tokens.ids[begin:end]).any():
                shown = str(self.tokenizer.decode(ids[begin:end].tolist(), clean_up_tokenization_spaces=False))
                original = word.text
            words.append(Word(word.before, shown, float(probabilities[begin:end].max()), original))
        if threshold is None:
            threshold = measured_threshold(self.discriminator.config)
        if threshold is None:
            threshold = usual_threshold([word.probability for word in words])
        return Passage(words, after, threshold, is_corrupted=share > 0)

    def knows(self, text: str) -> bool:
        """Whether the tokenizer has an entry for most of a text. Of [UNK] a discriminator can tell nothing. Errors: UserError."""
        with user_errors():
            ids = self.encoder.encode_in_words(checked(text)).ids
        if self.encoder.unk_id is None or not len(ids):
            return True
        return float((ids == self.encoder.unk_id).mean()) <= MOST_UNKNOWN

    @torch.no_grad()
    def probabilities(self, ids: Ints) -> Array:
        """How likely each token of a text is a replaced one, float64 [n]. Errors: UserError."""

        def compute(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.discriminator(rows, attention_mask=mask).logits

        everything = np.arange(len(ids))
        logits = torch.cat([logits[row, column] for logits, row, column in self._read(ids, everything, compute)])
        if not torch.isfinite(logits).all():
            raise UserError("the discriminator gives no numbers for this text: its weights are damaged")
        found: Array = logits.double().sigmoid().cpu().numpy()
        return found

    def with_replaced(self, ids: Ints, share: float, seed: int) -> Ints:
        """The tokens of a text, some of them drawn anew as in training: by the generator, or at random where there is none. What
        is drawn may be what stood there."""
        n = len(ids)
        special = sorted(self.tokenizer.all_special_ids)
        ordinary = np.setdiff1d(np.arange(len(self.tokenizer)), special)
        K = int(mask_count(n, share))
        random = np.random.Philox(seed).random_raw(n + 2 * K)[None]
        candidates = ~np.isin(ids, special)[None]
        # Without a generator nobody reads the masked text.
        mask_id = self.tokenizer.mask_token_id if self.generator is not None else 0
        style = self.draws.mask_style
        masked = mask_tokens(
            ids[None],
            np.array([n]),
            candidates,
            share=share,
            style=style,
            mask_id=mask_id,
            ordinary_ids=ordinary,
            random=random,
            K=K,
        )
        is_used = masked.labels[0] != IGNORE
        positions = masked.positions[0][is_used]
        if self.generator is None:
            drawn = ordinary[random[0, n : n + len(positions)] % np.uint64(len(ordinary))]
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                drawn = self._drawn(masked.ids[0], positions, masked.labels[0][is_used])
        corrupted = ids.copy()
        corrupted[positions] = drawn
        return corrupted

    @torch.no_grad()
    def _drawn(self, masked_ids: Ints, positions: Ints, originals: Ints) -> Ints:
        """What the generator writes at these positions, in rising order, of a masked text. originals: what stood there."""
        generator: Any = self.generator
        _, sampling, temperature, disallow_correct = self.draws

        def compute(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return generator.electra(rows, attention_mask=mask).last_hidden_state

        drawn = []
        n_drawn = 0
        for hidden, row, column in self._read(masked_ids, positions, compute):
            at_masked = generator.generator_predictions(hidden[row, column])
            # On the CPU, so that every device draws the same.
            logits = generator.generator_lm_head(at_masked).float().cpu()
            labels = torch.from_numpy(originals[n_drawn : n_drawn + len(row)])
            logits = to_draw_from(logits, labels, temperature, disallow_correct)
            drawn.append(sample(logits, sampling).numpy())
            n_drawn += len(row)
        return np.concatenate(drawn) if drawn else np.empty(0, dtype=np.int64)

    def _read(
        self, ids: Ints, wanted: Ints, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Ints, Ints]]:
        """Read a text in windows, some at once: yields (what `compute` gives, and of those `wanted` tokens that are taken from
        these windows the row and the column). All of them come, in rising order.

        compute: of (ids int64 [R, T], attention mask [R, T]) -> [R, T, ...]. wanted: ascending.
        """
        room = self.length - 2
        windows = windows_of(len(ids), room, max(room // 2, 1))
        window = window_of_tokens(windows, len(ids))[wanted]
        for first in range(0, len(windows), ROWS):
            some = windows[first : first + ROWS]
            rows = np.full((len(some), max(end - begin for begin, end in some) + 2), self.encoder.pad_id)
            mask = np.zeros_like(rows)
            for i, (begin, end) in enumerate(some):
                rows[i, : end - begin + 2] = [self.encoder.cls_id, *ids[begin:end], self.encoder.sep_id]
                mask[i, : end - begin + 2] = 1
            is_here = (window >= first) & (window < first + len(some))
            row = window[is_here] - first
            begins = np.array([begin for begin, _ in some])
            # Behind CLS.
            column = wanted[is_here] - begins[row] + 1
            if len(row):
                found = compute(torch.from_numpy(rows).to(self.device), torch.from_numpy(mask).to(self.device))
                yield found, row, column


def checked(text: str) -> str:
    """A text that can be encoded. Errors: UserError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text {ascii(text)[:80]} is not UTF-8") from error
    return text


def length_of(config: Any) -> int:
    """How many positions a window has: as many as an example of the training, where the config tells it."""
    most: int = config.max_position_embeddings
    trained = getattr(config, LENGTH, None)
    if isinstance(trained, int) and LEAST_LENGTH <= trained <= most:
        return trained
    return most


def open_detector(flag: str, name: str, device: torch.device) -> Detector:
    """The Detector of a folder, a run's or its discriminator's, or of a name in the local cache of Hugging Face.

    Errors: UserError, one line that begins with the flag.
    """
    # transformers' table of weights that are not in the folder, which is told in a line here, and its bar.
    set_verbosity_error()
    disable_progress_bar()
    what = f"{flag} {name}"
    # Of "." there is no folder beside.
    place = Path(os.path.abspath(expanded(name)))
    for folder in (place / "discriminator", place):
        if (folder / "config.json").is_file():
            break
    else:
        folder = find_model(flag, name)
    discriminator = load_network(what, folder, ElectraForPreTraining)
    if discriminator.config.max_position_embeddings < LEAST_LENGTH:
        raise UserError(f"{what}: max_position_embeddings is {discriminator.config.max_position_embeddings}")
    with user_errors():
        tokenizer = load_tokenizer(folder)
        check_size(len(tokenizer), discriminator.config.vocab_size, what)
        check_ids_fit(max(tokenizer.get_vocab().values()) + 1, discriminator.config.vocab_size, what, OTHER_TOKENIZER)
    generator = None
    generator_folder = folder.with_name(GENERATOR)
    if (generator_folder / "config.json").is_file():
        generator = load_network(str(generator_folder), generator_folder, ElectraForMaskedLM)
        for field in ("vocab_size", "max_position_embeddings"):
            if getattr(generator.config, field) != getattr(discriminator.config, field):
                raise UserError(f"{generator_folder}: it has another {field} than the discriminator beside it")
        if tokenizer.mask_token_id is None:
            raise UserError(f"{what}: its tokenizer has no mask token, which the generator beside it needs")
    with user_errors():
        return Detector(discriminator, generator, tokenizer, device)
