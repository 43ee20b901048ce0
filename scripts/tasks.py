"""The evaluations: what each reads, which Groups it scores, and what its scores mean.

A task is a class with `items(paths, encoder, limits)`, a list of Items, and `metrics(items, scores)`. Intervals hold 95 % of
the probability: Wilson's for shares, and for ratios of sums (loss per token, bits per byte) the normal one with the
linearised variance over documents, or over windows where there is one document only.
"""

import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from common.errors import UserError
from dataset.reading.documents import BadLines, find_files, read_documents
from scripts.common import read_records
from scripts.scoring import Group

# 97.5 % quantile of the normal distribution.
Z = 1.959963984540054


class Metric(NamedTuple):
    value: float
    low: float
    high: float
    interval: str


class Limits(NamedTuple):
    max_length: int  # positions of a window
    stride: int  # new tokens in a window that overlaps the one before
    delimiter: str  # between a context and a choice
    group_by: str | None = None  # a field of the objects whose values get figures of their own
    bad_lines: BadLines | None = None  # counts faulty lines of a text corpus; None: the first one is an error


@dataclass
class Item:
    """What stands for itself in the results. size: {unit: how many}; answer: what is right; name: its subset."""

    groups: list
    size: dict = field(default_factory=dict)
    answer: int = 0
    name: str | None = None


class Perplexity:
    """Documents whole, as in training: BOS, text, EOS, every token but the first predicted once, in strided windows."""

    @staticmethod
    def items(paths, encoder, limits):
        items = []
        for file in (file for path in paths for file in find_files(path)):
            for _, text in read_documents(file, bad_lines=limits.bad_lines):
                (ids,) = encoder.encode([text])
                if len(ids) > 1:
                    size = {"bytes": len(encoder.body(text).encode()), "words": len(text.split())}
                    items.append(Item(windows(ids, limits.max_length, limits.stride), size))
        return items

    @staticmethod
    def metrics(items, scores):
        units = [
            (-sum(score.logprob for (score,) in of_item), sum(map(scored, item.groups)), item.size)
            for item, of_item in zip(items, scores, strict=True)
        ]
        loss, tokens, sizes = zip(*units, strict=True)
        by_document = [[size[unit] for size in sizes] for unit in ("bytes", "words")]
        if len(items) > 1:
            per_token = ratio(loss, tokens, interval := "linearised, over documents")
        else:
            losses = [-score.logprob for (score,) in scores[0]]
            per_token = ratio(losses, list(map(scored, items[0].groups)), "linearised, over windows")
        metrics = {"loss": per_token, "perplexity": transformed(per_token, exp)}
        for name, of, change in (
            ("bits_per_byte", by_document[0], lambda x: x / math.log(2)),
            ("word_perplexity", by_document[1], exp),
        ):
            if not sum(of):
                continue
            if len(items) > 1:
                metrics[name] = transformed(ratio(loss, of, interval), change)
            else:
                # The windows of one document: as wide, relatively, as the loss per token.
                scale = tokens[0] / of[0]
                metrics[name] = transformed(per_token, lambda x, s=scale, c=change: c(x * s))
        return metrics, {
            "documents": len(items),
            "tokens": sum(tokens),
            "bytes": sum(by_document[0]),
            "words": sum(by_document[1]),
        }


class Pairs:
    """`sentence_good` and `sentence_bad`: right if the model finds the good one likelier (sums of log-probabilities)."""

    @staticmethod
    def items(paths, encoder, limits):
        items = []
        for place, record in records(paths, {"sentence_good": str, "sentence_bad": str}):
            both = [start_ids(encoder, record[name]) for name in ("sentence_good", "sentence_bad")]
            if both[0] == both[1]:
                raise UserError(f"{place}: both sentences are the same tokens")
            common = next(i for i, (a, b) in enumerate(zip_longest(*both)) if a != b)
            # What both begin with counts for neither.
            common = min(common, *(len(ids) - 1 for ids in both))
            items.append(Item([group(both, [common] * 2, limits, place)], name=subset(record, limits, place)))
        return items

    @staticmethod
    def metrics(items, scores):
        right = [good.logprob > bad.logprob for ((good, bad),) in scores]
        return {"accuracy": share(right), **by_subset(items, right)}, {"pairs": len(items)}


class LastWord:
    """`text`: the model predicts its last word from what precedes it; right if each token is the likeliest one."""

    @staticmethod
    def items(paths, encoder, limits):
        items = []
        for place, record in records(paths, {"text": str}):
            text = record["text"].rstrip()
            context, _, word = text.rpartition(" ")
            if not context:
                raise UserError(f"{place}: no word follows a space")
            ids, start = start_ids(encoder, text), len(start_ids(encoder, context))
            items.append(
                Item([group([ids], [start], limits, place)], {"word": word}, name=subset(record, limits, place))
            )
        return items

    @staticmethod
    def metrics(items, scores):
        right = [score.greedy for ((score,),) in scores]
        loss = ratio([-score.logprob for ((score,),) in scores], [1] * len(items), "normal, over words")
        figures = {"accuracy": share(right), "word_perplexity": transformed(loss, exp), **by_subset(items, right)}
        return figures, {"words": len(items)}


class Choice:
    """`context`, `choices`, `answer` (a number from 0): right if the answer is the likeliest continuation.

    accuracy takes the sum of the log-probabilities, accuracy_per_byte that sum divided by the choice's bytes.
    """

    @staticmethod
    def items(paths, encoder, limits):
        items = []
        for place, record in records(paths, {"context": str, "choices": list, "answer": int}):
            choices, answer = record["choices"], record["answer"]
            if len(choices) < 2 or not all(isinstance(c, str) and c for c in choices) or not 0 <= answer < len(choices):
                raise UserError(f"{place}: choices wants two or more texts, answer the number of one, from 0")
            start = len(start_ids(encoder, record["context"]))
            sequences = [start_ids(encoder, record["context"] + limits.delimiter + choice) for choice in choices]
            starts = [min(start, len(ids) - 1) for ids in sequences]
            size = {"bytes": [len(choice.encode()) for choice in choices]}
            items.append(Item([group(sequences, starts, limits, place)], size, answer, subset(record, limits, place)))
        return items

    @staticmethod
    def metrics(items, scores):
        right, right_per_byte = [], []
        for item, (branches,) in zip(items, scores, strict=True):
            sums = [score.logprob for score in branches]
            means = [total / n for total, n in zip(sums, item.size["bytes"], strict=True)]
            right.append(sums.index(max(sums)) == item.answer)
            right_per_byte.append(means.index(max(means)) == item.answer)
        figures = {"accuracy": share(right), "accuracy_per_byte": share(right_per_byte), **by_subset(items, right)}
        return figures, {"questions": len(items)}


TASKS = {"perplexity": Perplexity, "pairs": Pairs, "last_word": LastWord, "choice": Choice}


# ---------------------------------------------------------------------------------------------------- reading


def windows(ids, max_length, stride):
    """The Groups of one document: each token but the first is scored once, after at least max_length - stride others
    (or all there are). The first window scores max_length tokens, each further one `stride`."""
    groups, done = [], 1
    while done < len(ids):
        end = min(len(ids), done + (stride if groups else max_length))
        begin = max(0, end - 1 - max_length)
        groups.append(Group(ids[begin:done], [ids[done:end]], [0]))
        done = end
    return groups


def start_ids(encoder, text):
    """BOS and the text's ids. A tokenizer without BOS gives EOS in its place: the first token needs something before."""
    ids = encoder.encode([text])[0]
    ids = ids if encoder.eos_id is None else ids[:-1]
    if encoder.bos_id is not None:
        return ids
    if encoder.eos_id is None:
        raise UserError("the tokenizer has neither BOS nor EOS to begin a sentence with")
    return [encoder.eos_id, *ids]


def records(paths, fields):
    for path in paths:
        for number, record in read_records(path, fields):
            yield f"{path}:{number}", record


def group(sequences, starts, limits, place):
    if min(map(len, sequences)) < 2:
        raise UserError(f"{place}: an empty text")
    try:
        return Group.of(sequences, starts, limits.max_length)
    except ValueError as error:
        raise UserError(f"{place}: {error}; raise --max_length") from None


def subset(record: dict, limits: Limits, place: str) -> str | None:
    """The record's value of --group_by, by which it is counted; None without that flag."""
    if limits.group_by is None:
        return None
    if limits.group_by not in record:
        known = ", ".join(sorted(record))
        raise UserError(f"{place}: --group_by {limits.group_by}: no such field; there are {known}")
    return str(record[limits.group_by])


def scored(group):
    return sum(len(branch) - start for branch, start in zip(group.branches, group.starts, strict=True))


# --------------------------------------------------------------------------------------------------- intervals


def share(right):
    """Share of true values with Wilson's interval (Wilson 1927; https://doi.org/10.1080/01621459.1927.10502953)."""
    n, p = len(right), sum(right) / len(right)
    middle, half = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    low, high = ((middle + sign * half) / (1 + Z * Z / n) for sign in (-1, 1))
    return Metric(p, max(low, 0.0), min(high, 1.0), "Wilson")


def ratio(tops, bottoms, interval):
    """sum(tops) / sum(bottoms); variance of a ratio of sums by linearisation (Cochran, Sampling Techniques, 6.4)."""
    n, value = len(tops), math.fsum(tops) / sum(bottoms)
    if n < 2:
        return Metric(value, math.nan, math.nan, "none: one unit")
    squares = math.fsum((top - value * bottom) ** 2 for top, bottom in zip(tops, bottoms, strict=True))
    half = Z * math.sqrt(n / (n - 1) * squares) / sum(bottoms)
    return Metric(value, value - half, value + half, interval)


def transformed(metric, change):
    """The metric of an increasing function of the value: its interval is the function of the ends."""
    return Metric(change(metric.value), change(metric.low), change(metric.high), metric.interval)


def exp(x):
    return math.exp(min(x, 700))


def by_subset(items, right):
    """{"accuracy/name": share} where the items have names."""
    names = sorted({item.name for item in items if item.name is not None})
    return {
        f"accuracy/{name}": share([r for item, r in zip(items, right, strict=True) if item.name == name])
        for name in names
    }
