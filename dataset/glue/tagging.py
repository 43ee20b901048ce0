"""Sentences whose words have tags, as in CoNLL's tasks: reading them, and their features.

A line of a .jsonl file is a sentence: {"words": ["Ada", "lives"], "tags": ["B-PER", "O"]}. A word may be several tokens.
The first of them has the word's class, and the others have none. A sentence that is longer than an example becomes
several, each with the words that fit: so every word is trained and scored, none is cut off.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from dataset.glue.features import NO_CLASS, Features, id_type
from dataset.glue.glue_tasks import Task
from dataset.glue.tables import LONGEST_SHOWN, OTHER_FIELD, check_text, json_objects
from dataset.reading.json_lines import json_type
from dataset.tokenizing.sentence_encoder import SentenceEncoder


class Sentence(NamedTuple):
    words: list[str]
    # Classes of the words, numbers in the order of the task's labels; 0 everywhere in a test file.
    classes: list[int]


def read_sentences(path: Path, task: Task, labelled: bool = True) -> list[Sentence]:
    """The sentences of a file. Errors: DataError that names file and line."""
    number_of = {label: i for i, label in enumerate(task.labels)}
    sentences = []
    for number, record in json_objects(path):
        place = f"{path}:{number}"
        words = texts_of(record, task.text[0], place)
        if not words:
            raise DataError(f"{place}: {task.text[0]!r} has no word; drop the line")
        classes = [0] * len(words)
        if labelled:
            tags = texts_of(record, task.label, place)
            if len(tags) != len(words):
                raise DataError(f"{place}: {len(words)} words and {len(tags)} tags; mend the line")
            for i, tag in enumerate(tags):
                if tag not in number_of:
                    known = ", ".join(task.labels)[:200]
                    raise DataError(f"{place}: tag {tag[:LONGEST_SHOWN]!r} is not one of {known}; mend the line")
                classes[i] = number_of[tag]
        sentences.append(Sentence(words, classes))
    if not sentences:
        raise DataError(f"{path}: no example in there")
    return sentences


def tags_of_file(path: Path, task: Task) -> list[str]:
    """The different tags in a file, sorted. Errors: DataError."""
    found: set[str] = set()
    for number, record in json_objects(path):
        tags = texts_of(record, task.label, f"{path}:{number}")
        if any(not tag.strip() for tag in tags):
            raise DataError(f"{path}:{number}: a tag is blank; mend the line (O is usual for a word without one)")
        found.update(tags)
    if not found:
        raise DataError(f"{path}: no example in there")
    return sorted(found)


def texts_of(record: dict[str, object], name: str, place: str) -> list[str]:
    """The list of texts in a field. Errors: DataError."""
    if name not in record:
        raise DataError(f"{place}: no {name!r} in the object; {OTHER_FIELD}")
    items = record[name]
    if not isinstance(items, list):
        raise DataError(f"{place}: {name!r} is a {json_type(items)}, not a list of strings; mend the line")
    return [check_text(item, f"an item of {name!r}", place) for item in items]


def encode_sentences(sentences: list[Sentence], encoder: SentenceEncoder, max_seq_len: int) -> Features:
    """The Features of sentences, each in as many parts as it needs."""
    room = max_seq_len - 2
    tokens_of = tokens_of_words(sentences, encoder)
    tokens: list[int] = []
    classes: list[int] = []
    sizes: list[int] = []
    part_of: list[int] = []
    for number, sentence in enumerate(sentences):
        size = 0
        for word, word_class in zip(sentence.words, sentence.classes, strict=True):
            ids = tokens_of[word][:room]
            if size + len(ids) > room:
                sizes.append(size)
                part_of.append(number)
                size = 0
            tokens += ids
            classes += [word_class] + [NO_CLASS] * (len(ids) - 1)
            size += len(ids)
        sizes.append(size)
        part_of.append(number)
    first = np.array(sizes, dtype=np.int64)
    return Features(
        tokens=np.array(tokens, dtype=id_type(encoder)),
        begin=np.cumsum(first) - first,
        first=first,
        second=np.zeros_like(first),
        labels=np.zeros(0, dtype=np.int64),
        pair=np.array(False),
        skipped=np.array(0),
        classes=np.array(classes, dtype=np.int16),
        part_of=np.array(part_of, dtype=np.int64),
    )


def tokens_of_words(sentences: list[Sentence], encoder: SentenceEncoder) -> dict[str, list[int]]:
    """{word: its ids, at least one}. Each word is encoded once."""
    words = sorted({word for sentence in sentences for word in sentence.words})
    # The blank is for tokenizers of bytes, to which "Ada" and " Ada" are two words: within a sentence it is the second.
    encoded = encoder.encode([f" {word}" for word in words])
    # Some words are nothing to a tokenizer, such as a control character. They have a class all the same.
    unknown = encoder.sep_id if encoder.unk_id is None else encoder.unk_id
    return {word: ids or [unknown] for word, ids in zip(words, encoded, strict=True)}
