"""The evaluations: what each reads, which Groups it scores, and what its scores mean.

A `Task` says what its Items are and what their scores mean; evaluate.py does the rest. Intervals hold 95 % of
the probability: Wilson's for shares, and for ratios of sums (loss per token, bits per byte) the normal one with the
linearised variance over documents, or over windows where there is one document only.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, TypeVar

from common.errors import UserError
from dataset.reading.documents import BadLines, find_files, read_documents
from dataset.reading.faults import Fault, pass_over
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.long_texts import TooLongToEncode
from scripts.common import Fields, read_records
from scripts.scoring import Group, Score

# 97.5 % quantile of the normal distribution.
Z = 1.959963984540054

Value = TypeVar("Value")


class Metric(NamedTuple):
    value: float
    low: float
    high: float
    interval: str


class Limits(NamedTuple):
    # Positions of a window.
    max_length: int
    # New tokens in a window that overlaps the one before.
    stride: int
    # Between a context and a choice.
    delimiter: str
    # A field of the objects whose values get figures of their own.
    group_by: str | None = None
    # Counts faulty lines of a text corpus; None: the first one is an error.
    bad_lines: BadLines | None = None


@dataclass
class Item:
    """What stands for itself in the results. sizes: {unit: how many}; name: its subset.

    answer and choice_bytes are of a choice alone: which one is right, and how long each is.
    """

    groups: list[Group]
    sizes: dict[str, int] = field(default_factory=dict)
    answer: int = 0
    choice_bytes: list[int] = field(default_factory=list)
    name: str | None = None


# The Scores of each group of an item.
ItemScores = list[list[Score]]
# {name of a figure: its value}, and {unit: how many were scored}.
Results = tuple[dict[str, Metric], dict[str, int]]


class Task(Protocol):
    """An evaluation."""

    def items(self, paths: Sequence[str], encoder: DocumentEncoder, limits: Limits) -> list[Item]:
        """Read the files. Errors: UserError that names file and line."""

    def metrics(self, items: Sequence[Item], scores: Sequence[ItemScores]) -> Results:
        """The figures, from the scores of each item."""


class Perplexity:
    """Documents whole, as in training: BOS, text, EOS, every token but the first predicted once, in strided windows."""

    def items(self, paths: Sequence[str], encoder: DocumentEncoder, limits: Limits) -> list[Item]:
        items = []
        for path in paths:
            for file in find_files(path):
                for line, text in read_documents(file, bad_lines=limits.bad_lines):
                    # The ids of all documents are kept: an int of Python takes nine times the memory of one in an array.
                    ids = array("i")
                    try:
                        for part in encoder.encode_in_parts(text):
                            ids.extend(part)
                    except TooLongToEncode as error:
                        pass_over(Fault(str(file), line, "too long", str(error)), limits.bad_lines)
                        continue
                    # A single token has nothing to predict.
                    if len(ids) > 1:
                        sizes = {"bytes": len(encoder.body(text).encode()), "words": len(text.split())}
                        items.append(Item(windows(ids, limits.max_length, limits.stride), sizes))
        return items

    def metrics(self, items: Sequence[Item], scores: Sequence[ItemScores]) -> Results:
        losses = []
        tokens = []
        for item, of_item in zip(items, scores, strict=True):
            losses.append(-sum(only(of_window).logprob for of_window in of_item))
            tokens.append(sum(map(n_scored, item.groups)))
        bytes_of = [item.sizes["bytes"] for item in items]
        words_of = [item.sizes["words"] for item in items]
        per_token = self._loss_per_token(items, scores, losses, tokens)
        figures = {"loss": per_token, "perplexity": transformed(per_token, exp)}
        for name, units, change in (("bits_per_byte", bytes_of, bits), ("word_perplexity", words_of, exp)):
            # A text of characters without any spaces has one word, one of spaces alone has none.
            if sum(units):
                per_unit = self._loss_per_unit(per_token, losses, tokens, units)
                figures[name] = transformed(per_unit, change)
        counts = {
            "documents": len(items),
            "tokens": sum(tokens),
            "bytes": sum(bytes_of),
            "words": sum(words_of),
        }
        return figures, counts

    @staticmethod
    def _loss_per_token(
        items: Sequence[Item], scores: Sequence[ItemScores], losses: Sequence[float], tokens: Sequence[int]
    ) -> Metric:
        """In nats."""
        if len(items) > 1:
            return ratio(losses, tokens, "linearised, over documents")
        # One document alone says nothing of how documents differ; its windows do, a little.
        of_windows = [-only(of_window).logprob for of_window in scores[0]]
        return ratio(of_windows, list(map(n_scored, items[0].groups)), "linearised, over windows")

    @staticmethod
    def _loss_per_unit(
        per_token: Metric, losses: Sequence[float], tokens: Sequence[int], units: Sequence[int]
    ) -> Metric:
        """In nats per byte or word of the text."""
        if len(losses) > 1:
            return ratio(losses, units, per_token.interval)
        # The windows of one document have no bytes of their own: as wide, relatively, as the loss per token.
        tokens_per_unit = tokens[0] / units[0]
        return transformed(per_token, lambda loss: loss * tokens_per_unit)


class Pairs:
    """`sentence_good` and `sentence_bad`: right if the model finds the good one likelier (sums of log-probabilities)."""

    def items(self, paths: Sequence[str], encoder: DocumentEncoder, limits: Limits) -> list[Item]:
        items = []
        for place, record in records(paths, {"sentence_good": str, "sentence_bad": str}):
            good = start_ids(encoder, record["sentence_good"])
            bad = start_ids(encoder, record["sentence_bad"])
            if good == bad:
                # A tie, whatever the model says.
                items.append(Item([], name=subset(record, limits, place)))
                continue
            # What both begin with counts for neither. One token of each is scored at least.
            common = min(first_difference(good, bad), len(good) - 1, len(bad) - 1)
            both = group([good, bad], [common, common], limits, place)
            items.append(Item([both], name=subset(record, limits, place)))
        return items

    def metrics(self, items: Sequence[Item], scores: Sequence[ItemScores]) -> Results:
        right = []
        for of_item in scores:
            # A tie is no success: a model that gives everything the same would have 100 % otherwise.
            is_right = False
            if of_item:
                good, bad = only(of_item)
                is_right = good.logprob > bad.logprob
            right.append(is_right)
        return {"accuracy": share(right), **by_subset(items, right)}, {"pairs": len(items)}


class LastWord:
    """`text`: the model predicts its last word from what precedes it; right if each token is the likeliest one."""

    def items(self, paths: Sequence[str], encoder: DocumentEncoder, limits: Limits) -> list[Item]:
        items = []
        for place, record in records(paths, {"text": str}):
            # A space at the end would be taken for the one before the last word.
            text = record["text"].rstrip()
            context, _, _ = text.rpartition(" ")
            if not context:
                raise UserError(f"{place}: no word follows a space")
            ids = start_ids(encoder, text)
            start = len(start_ids(encoder, context))
            items.append(Item([group([ids], [start], limits, place)], name=subset(record, limits, place)))
        return items

    def metrics(self, items: Sequence[Item], scores: Sequence[ItemScores]) -> Results:
        words = [only(only(of_item)) for of_item in scores]
        right = [word.greedy for word in words]
        losses = [-word.logprob for word in words]
        per_word = ratio(losses, [1] * len(items), "normal, over words")
        figures = {"accuracy": share(right), "word_perplexity": transformed(per_word, exp), **by_subset(items, right)}
        return figures, {"words": len(items)}


class Choice:
    """`context`, `choices`, `answer` (a number from 0): right if the answer is the likeliest continuation.

    accuracy takes the sum of the log-probabilities, accuracy_per_byte that sum divided by the choice's bytes.
    """

    def items(self, paths: Sequence[str], encoder: DocumentEncoder, limits: Limits) -> list[Item]:
        items = []
        for place, record in records(paths, {"context": str, "choices": list, "answer": int}):
            context = record["context"]
            choices = record["choices"]
            answer = record["answer"]
            are_texts = all(isinstance(choice, str) and choice for choice in choices)
            if len(choices) < 2 or not are_texts or not 0 <= answer < len(choices):
                raise UserError(f"{place}: choices wants two or more texts, answer the number of one, from 0")
            start = len(start_ids(encoder, context))
            sequences = [start_ids(encoder, context + limits.delimiter + choice) for choice in choices]
            # A choice may melt into the last token of the context; its last token is scored all the same.
            starts = [min(start, len(ids) - 1) for ids in sequences]
            items.append(
                Item(
                    [group(sequences, starts, limits, place)],
                    answer=answer,
                    choice_bytes=[len(choice.encode()) for choice in choices],
                    name=subset(record, limits, place),
                )
            )
        return items

    def metrics(self, items: Sequence[Item], scores: Sequence[ItemScores]) -> Results:
        right = []
        right_per_byte = []
        for item, of_item in zip(items, scores, strict=True):
            sums = [score.logprob for score in only(of_item)]
            means = [total / n for total, n in zip(sums, item.choice_bytes, strict=True)]
            right.append(is_likeliest(sums, item.answer))
            right_per_byte.append(is_likeliest(means, item.answer))
        figures = {"accuracy": share(right), "accuracy_per_byte": share(right_per_byte), **by_subset(items, right)}
        return figures, {"questions": len(items)}


def is_likeliest(logprobs: Sequence[float], answer: int) -> bool:
    """Whether the answer is likelier than each other choice. A tie is no success."""
    return all(logprobs[answer] > logprob for i, logprob in enumerate(logprobs) if i != answer)


TASKS: dict[str, Task] = {
    "perplexity": Perplexity(),
    "pairs": Pairs(),
    "last_word": LastWord(),
    "choice": Choice(),
}


# ---------------------------------------------------------------------------------------------------- reading


def windows(ids: Sequence[int], max_length: int, stride: int) -> list[Group]:
    """The Groups of one document: each token but the first is scored once, after at least max_length - stride others
    (or all there are). The first window scores max_length tokens, each further one `stride`."""
    groups: list[Group] = []
    done = 1
    while done < len(ids):
        new = stride if groups else max_length
        end = min(len(ids), done + new)
        begin = max(0, end - 1 - max_length)
        groups.append(Group(ids[begin:done], [ids[done:end]], [0]))
        done = end
    return groups


def start_ids(encoder: DocumentEncoder, text: str) -> list[int]:
    """BOS and the text's ids. A tokenizer without BOS gives EOS in its place: the first token needs something before.

    Errors: UserError for a tokenizer with neither.
    """
    (ids,) = encoder.encode([text])
    if encoder.eos_id is not None:
        ids = ids[:-1]
    if encoder.bos_id is not None:
        return ids
    if encoder.eos_id is None:
        raise UserError("the tokenizer has neither BOS nor EOS to begin a sentence with")
    return [encoder.eos_id, *ids]


def records(paths: Sequence[str], fields: Fields) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place for an error, object) of all files. Errors: see `read_records`."""
    for path in paths:
        for number, record in read_records(path, fields):
            yield f"{path}:{number}", record


def group(sequences: list[list[int]], starts: list[int], limits: Limits, place: str) -> Group:
    """Group.of. Errors: UserError that names the place."""
    if min(map(len, sequences)) < 2:
        raise UserError(f"{place}: an empty text")
    try:
        return Group.of(sequences, starts, limits.max_length)
    except ValueError as error:
        raise UserError(f"{place}: {error}; raise --max_length") from None


def subset(record: dict[str, Any], limits: Limits, place: str) -> str | None:
    """The record's value of --group_by, by which it is counted; None without that flag."""
    if limits.group_by is None:
        return None
    if limits.group_by not in record:
        known = ", ".join(sorted(record))
        raise UserError(f"{place}: --group_by {limits.group_by}: no such field; there are {known}")
    return str(record[limits.group_by])


def first_difference(a: list[int], b: list[int]) -> int:
    """The first place at which two different lists differ; the shorter one's length if it is the other's beginning."""
    for place, (of_a, of_b) in enumerate(zip_longest(a, b)):
        if of_a != of_b:
            return place
    raise AssertionError("the lists are equal")


def n_scored(group: Group) -> int:
    """How many tokens of a group are scored."""
    return sum(len(branch) - start for branch, start in zip(group.branches, group.starts, strict=True))


def only(values: list[Value]) -> Value:
    """The one value of a list."""
    (value,) = values
    return value


# --------------------------------------------------------------------------------------------------- intervals


def share(right: Sequence[bool]) -> Metric:
    """Share of true values with Wilson's interval (Wilson 1927; https://doi.org/10.1080/01621459.1927.10502953)."""
    # The plain interval p ± z sqrt(p (1 - p) / n) is empty at p = 0 and p = 1; Wilson's is not.
    n = len(right)
    p = sum(right) / n
    middle = p + Z * Z / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    low = (middle - half) / (1 + Z * Z / n)
    high = (middle + half) / (1 + Z * Z / n)
    return Metric(p, max(low, 0.0), min(high, 1.0), "Wilson")


def ratio(tops: Sequence[float], bottoms: Sequence[int], interval: str) -> Metric:
    """sum(tops) / sum(bottoms); variance of a ratio of sums by linearisation (Cochran, Sampling Techniques, 6.4)."""
    n = len(tops)
    value = math.fsum(tops) / sum(bottoms)
    if n < 2:
        return Metric(value, math.nan, math.nan, "none: one unit")
    # The residuals of the documents from the common ratio.
    squares = math.fsum((top - value * bottom) ** 2 for top, bottom in zip(tops, bottoms, strict=True))
    half = Z * math.sqrt(n / (n - 1) * squares) / sum(bottoms)
    return Metric(value, value - half, value + half, interval)


def transformed(metric: Metric, change: Callable[[float], float]) -> Metric:
    """The metric of an increasing function of the value: its interval is the function of the ends."""
    return Metric(change(metric.value), change(metric.low), change(metric.high), metric.interval)


def exp(x: float) -> float:
    """e^x; beyond 700 that of 700, since a float ends soon after it."""
    return math.exp(min(x, 700))


def bits(nats: float) -> float:
    return nats / math.log(2)


def by_subset(items: Sequence[Item], right: Sequence[bool]) -> dict[str, Metric]:
    """{"accuracy/name": share} where the items have names."""
    of_names: dict[str, list[bool]] = {}
    for item, is_right in zip(items, right, strict=True):
        if item.name is not None:
            of_names.setdefault(item.name, []).append(is_right)
    return {f"accuracy/{name}": share(of_names[name]) for name in sorted(of_names)}
