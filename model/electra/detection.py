"""A text as a discriminator sees it: how likely each word is a replaced one, and which words it doubts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from common.wording import counted
from model.electra.sizes import MASK_STYLES, SAMPLING

# Fields of our own in a discriminator's config.json. The probability from which on a word is doubted, where it was
# measured on held-out text:
THRESHOLD = "doubt_threshold"
# and the positions of the examples that it was trained with: the embeddings of those beyond have learned nothing.
LENGTH = "trained_length"

# A field of our own in a generator's config.json: how its run masked tokens and drew others. The usual ways have no such field.
DRAWS = "replaced_by"

# Where nothing was measured, a word is doubted from twice the mean probability of the text's words on, within these
# bounds. About a tenth of the tokens are replaced in training, so a discriminator that knows nothing says 0.1 of each; one
# that knows much is right with 0.5, also in a text of which it doubts every word.
LEAST_THRESHOLD = 0.2
MOST_THRESHOLD = 0.5


def usual_threshold(probabilities: Sequence[float]) -> float:
    """From which probability on a word is doubted, of a discriminator of which nothing was measured."""
    mean = math.fsum(probabilities) / max(len(probabilities), 1)
    return min(max(2 * mean, LEAST_THRESHOLD), MOST_THRESHOLD)


def measured_threshold(config: object) -> float | None:
    """That of a discriminator's config; None where it has none."""
    value = getattr(config, THRESHOLD, None)
    return float(value) if is_probability(value) else None


def tell_detector(config: object, length: int, threshold: float | None) -> None:
    """Write into a discriminator's config how long its examples were, and what was measured. None: nothing was."""
    setattr(config, LENGTH, length)
    if threshold is not None:
        setattr(config, THRESHOLD, threshold)
    elif hasattr(config, THRESHOLD):
        # Of the networks that the run began with.
        delattr(config, THRESHOLD)


class Draws(NamedTuple):
    """How tokens are masked and a generator's are drawn: as the flags of these names of train_electra.py say."""

    mask_style: str = "electra"
    sampling: str = "multinomial"
    temperature: float = 1.0
    disallow_correct: bool = False


def tell_draws(config: object, draws: Draws) -> None:
    """Write into a generator's config what its run does otherwise than usual."""
    usual = Draws()._asdict()
    others = {name: value for name, value in draws._asdict().items() if value != usual[name]}
    if others:
        setattr(config, DRAWS, others)
    elif hasattr(config, DRAWS):
        # Of the networks that the run began with.
        delattr(config, DRAWS)


def draws_of(config: object) -> Draws:
    """What `tell_draws` wrote; the usual ways in place of what it did not."""
    fields = getattr(config, DRAWS, None)
    if not isinstance(fields, Mapping):
        return Draws()
    found = Draws()
    if fields.get("mask_style") in MASK_STYLES:
        found = found._replace(mask_style=fields["mask_style"])
    if fields.get("sampling") in SAMPLING:
        found = found._replace(sampling=fields["sampling"])
    temperature = fields.get("temperature")
    if isinstance(temperature, int | float) and not isinstance(temperature, bool) and 0 < temperature < math.inf:
        found = found._replace(temperature=float(temperature))
    return found._replace(disallow_correct=fields.get("disallow_correct") is True)


def is_probability(value: object) -> TypeGuard[float]:
    """Whether it is a number from 0 to 1: a file may hold anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


@dataclass(frozen=True)
class Word:
    """A word as the discriminator reads it. before: what stands between it and the word before it."""

    before: str
    text: str
    # Of being a replaced one: the highest of its tokens.
    probability: float
    # What it has replaced; None: it stood there.
    original: str | None = None

    @property
    def is_replaced(self) -> bool:
        return self.original is not None


@dataclass(frozen=True)
class Counts:
    """Of a text in which words were replaced: how many of these are doubted, and of the others."""

    replaced: int = 0
    found: int = 0
    others: int = 0
    wrongly_doubted: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.replaced + other.replaced,
            self.found + other.found,
            self.others + other.others,
            self.wrongly_doubted + other.wrongly_doubted,
        )


@dataclass(frozen=True)
class Passage:
    """A text, word by word. after: what stands behind the last word. is_corrupted: some words were replaced on purpose, so that
    it is known which."""

    words: list[Word]
    after: str
    threshold: float
    is_corrupted: bool = False

    def doubts(self, word: Word) -> bool:
        return word.probability >= self.threshold

    @property
    def doubted(self) -> list[Word]:
        return [word for word in self.words if self.doubts(word)]

    @property
    def missed(self) -> list[Word]:
        """The replaced words that are not doubted."""
        return [word for word in self.words if word.is_replaced and not self.doubts(word)]

    @property
    def counts(self) -> Counts:
        found = sum(word.is_replaced for word in self.doubted)
        replaced = found + len(self.missed)
        return Counts(replaced, found, len(self.words) - replaced, len(self.doubted) - found)

    @property
    def outcome(self) -> str:
        """See the function of this name."""
        return outcome([self])

    def as_record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        words = []
        for word in self.words:
            record: dict[str, Any] = {
                "before": word.before,
                "word": word.text,
                "probability": word.probability,
                "doubted": self.doubts(word),
            }
            if self.is_corrupted:
                record["original"] = word.text if word.original is None else word.original
                record["replaced"] = word.is_replaced
            words.append(record)
        return {"threshold": self.threshold, "corrupted": self.is_corrupted, "words": words, "after": self.after}


def total(passages: Sequence[Passage]) -> Counts:
    """The Counts of several."""
    counts = Counts()
    for passage in passages:
        counts += passage.counts
    return counts


def outcome(passages: Sequence[Passage]) -> str:
    """How many words are doubted, as part of a line; where words were replaced on purpose, how many of these."""
    if not any(passage.is_corrupted for passage in passages):
        n_words = sum(len(passage.words) for passage in passages)
        n_doubted = sum(len(passage.doubted) for passage in passages)
        return f"{n_doubted:,} of {counted(n_words, 'word')} doubted"
    counts = total(passages)
    return (
        f"{counts.found:,} of {counted(counts.replaced, 'replaced word')} doubted, {counts.wrongly_doubted:,} of "
        f"{counted(counts.others, 'other')}"
    )


def passage_of_record(record: object) -> Passage | None:
    """What `as_record` wrote; None for what it did not."""
    if not isinstance(record, Mapping) or not isinstance(record.get("words"), list):
        return None
    threshold = record.get("threshold")
    after = record.get("after")
    is_corrupted = record.get("corrupted")
    if not is_probability(threshold) or not isinstance(after, str) or not isinstance(is_corrupted, bool):
        return None
    words = []
    for entry in record["words"]:
        word = _word_of_record(entry)
        if word is None:
            return None
        words.append(word)
    return Passage(words, after, float(threshold), is_corrupted)


def _word_of_record(entry: object) -> Word | None:
    if not isinstance(entry, Mapping):
        return None
    before = entry.get("before")
    text = entry.get("word")
    probability = entry.get("probability")
    if not isinstance(before, str) or not isinstance(text, str) or not is_probability(probability):
        return None
    original = entry.get("original") if entry.get("replaced") is True else None
    if original is not None and not isinstance(original, str):
        return None
    return Word(before, text, float(probability), original)
