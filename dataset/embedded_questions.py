"""Conversations that every machine has, for fine-tuning: questions on the built-in functions and classes and those of everyday
modules, answered by the first sentence of their documentation. They are few enough for a small model to memorise.
"""

import builtins
import inspect
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from common.start import ROOT
from dataset.embedded_corpus import LIBRARY, JsonObject, build_once, entries, source_files

# Ways to ask about a name; the data has each answer once per phrasing.
PHRASINGS = ("What does {} do?", "What is {} for?", "Explain {}.")
# Commonly used modules that every system has
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
# Up to a full stop followed by the start of another sentence, so not the one in "e.g. a"
SENTENCE = re.compile(r"(.*?(?:[.!?](?=\s+[A-Z\"'`(*]|$)|[。！？]))")
# Characters of an answer: longer first sentences tend to be lists, shorter ones fragments.
MIN_CHARACTERS = 15
MAX_CHARACTERS = 160
# Marks of signatures, examples and tables
NO_PROSE = ("->", "::", ">>>", "|")


def build_embedded_questions(path: str | Path = ROOT / "dataset" / "python_questions.jsonl") -> Path:
    """Writes the conversations to `path` as jsonl, as `build_embedded_corpus` does the corpus."""
    return build_once(Path(path), _conversations)


def _conversations() -> Iterator[JsonObject]:
    for name, answer in answers().items():
        for phrasing in PHRASINGS:
            turns = [{"role": "user", "content": phrasing.format(name)}, {"role": "assistant", "content": answer}]
            yield {"conversations": turns}


def answers() -> dict[str, str]:
    """{name: the first sentence of its documentation}, if that is prose."""
    answer_of: dict[str, str] = {}
    for name, text in chain(_of_builtins(), _of_library()):
        answer = first_sentence(text)
        is_long_enough = MIN_CHARACTERS <= len(answer) <= MAX_CHARACTERS
        if is_long_enough and answer[0].isupper() and not any(mark in answer for mark in NO_PROSE):
            answer_of.setdefault(name, answer)
    return answer_of


def first_sentence(text: str) -> str:
    """The first sentence of a text, on one line; its first paragraph if that has no full stop."""
    paragraph = re.split(r"\n\s*\n", text.strip())[0]
    line = " ".join(paragraph.split())
    sentence = SENTENCE.match(line)
    return sentence[1] if sentence else line


def _of_builtins(owner: object = builtins, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, documentation) of the built-in functions, types and their methods, which are written in C."""
    for name, value in sorted(vars(owner).items()):
        if name.startswith("_") or (owner is builtins and not callable(value)):
            continue
        yield prefix + name, inspect.getdoc(value) or ""
        if owner is builtins and isinstance(value, type) and not issubclass(value, BaseException):
            yield from _of_builtins(value, f"{name}.")


def _of_library() -> Iterator[tuple[str, str]]:
    """(name, documentation) of the functions, classes and methods in MODULES."""
    for entry in chain.from_iterable(entries(file, name) for file, name in source_files(LIBRARY, "")):
        heading, _, text = entry.partition("\n")
        keyword, _, name = heading.partition("(")[0].rpartition(" ")
        parts = name.split(".")
        if keyword != "module" and parts[0] in MODULES and not any(part.startswith("_") for part in parts):
            yield name, text
