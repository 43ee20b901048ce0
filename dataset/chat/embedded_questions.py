"""Conversations that every machine has: questions on what is in Python, answered by the first sentence of its documentation.

They are there so that fine-tuning works at once. The functions and classes are the built-in ones and those of everyday
modules of the standard library: few enough for a small model to learn all of them by heart.
"""

import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataset.embedded_corpus import Record, build_once, library_entries

# The ways to ask after a name; each answer stands in the data once for each.
PHRASINGS = ("What does {} do?", "What is {} for?", "Explain {}.")
# Those that people use, without what is there on some systems only.
MODULES = (
    "argparse", "ast", "base64", "bisect", "bz2", "calendar", "codecs", "collections", "configparser", "contextlib",
    "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "enum", "fileinput", "fnmatch",
    "fractions", "functools", "glob", "graphlib", "gzip", "hashlib", "heapq", "hmac", "html", "inspect", "io",
    "ipaddress", "json", "linecache", "logging", "lzma", "mimetypes", "numbers", "operator", "os", "pathlib",
    "pickle", "pkgutil", "platform", "plistlib", "pprint", "queue", "random", "re", "reprlib", "sched", "secrets",
    "selectors", "shelve", "shlex", "shutil", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "tokenize", "tomllib", "traceback", "types", "typing", "urllib", "uuid",
    "warnings", "weakref", "zipfile", "zoneinfo",
)  # fmt: skip
# Up to a full stop with the beginning of another sentence behind it: that of "e.g. a" is none.
SENTENCE = re.compile(r"(.*?[.!?])(?:\s+(?=[A-Z\"'`(*])|$)")
# Characters of an answer. Longer first sentences are rather lists, shorter ones no sentences.
SHORTEST = 15
LONGEST = 160
# Marks of signatures, examples and tables
NO_PROSE = ("->", "::", ">>>", "|")


def build_embedded_questions(path: str | Path) -> Path:
    """Writes the conversations to `path` as jsonl, which takes some seconds, unless it is there; returns the path.

    The same Python gives the same file.
    """
    return build_once(Path(path), _records)


def _records() -> Iterator[Record]:
    for question, answer in questions():
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"conversations": turns}


def questions() -> Iterator[tuple[str, str]]:
    """(question, answer), in a fixed order; the questions on one name follow each other."""
    for name, answer in answers().items():
        for phrasing in PHRASINGS:
            yield phrasing.format(name), answer


def answers() -> dict[str, str]:
    """{name: the first sentence of its documentation}, where that is prose."""
    found: dict[str, str] = {}
    for name, text in [*_built_in(), *_of_modules()]:
        answer = first_sentence(text)
        if name not in found and _is_prose(answer):
            found[name] = answer
    return found


def first_sentence(text: str) -> str:
    """On one line; of a text without a full stop its first paragraph."""
    paragraph = re.split(r"\n\s*\n", text.strip())[0]
    line = " ".join(paragraph.split())
    found = SENTENCE.match(line)
    return found.group(1) if found else line


def _is_prose(sentence: str) -> bool:
    if not SHORTEST <= len(sentence) <= LONGEST or not sentence[0].isupper():
        return False
    return not any(mark in sentence for mark in NO_PROSE)


def _built_in() -> Iterator[tuple[str, str]]:
    """(name, documentation) of the built-in functions, types and their methods, which are written in C."""
    for name, value in _public(builtins):
        if not callable(value):
            continue
        yield name, inspect.getdoc(value) or ""
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        if isinstance(value, type) and not is_exception:
            for method_name, method in _public(value):
                yield f"{name}.{method_name}", inspect.getdoc(method) or ""


def _public(owner: object) -> Iterator[tuple[str, Any]]:
    """(name, value) of what an object has and users are meant to know, by name."""
    for name, value in sorted(vars(owner).items()):
        if not name.startswith("_"):
            yield name, value


def _of_modules() -> Iterator[tuple[str, str]]:
    """(name, documentation) of the functions, classes and methods in MODULES."""
    for entry in library_entries():
        heading, _, text = entry.partition("\n")
        kind, _, name = heading.partition("(")[0].rpartition(" ")
        parts = name.split(".")
        if kind != "module" and parts[0] in MODULES and not any(part.startswith("_") for part in parts):
            yield name, text
