"""A corpus that every machine has, so that training works at once; dataset/README.md says how to get a full one.

The documentation inside the installed Python: the language reference (`pydoc_data.topics`) and the docstrings of the
standard library and NumPy, read out of their source files without running any of their modules.

And conversations for fine-tuning, few enough for a small model to memorise: questions on the built-in functions and classes
and those of everyday modules, answered by the first sentence of their documentation.
"""

import ast
import builtins
import contextlib
import inspect
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from textwrap import indent

import numpy

from common.files import atomic_file, file_lock
from common.start import ROOT

# An object, as a line of a jsonl
JsonObject = dict[str, object]

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Path components: tests, modules gone in newer Pythons or present on some systems only, jokes, and third-party code
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "distutils", "encodings", "pydoc_data", "antigravity"}
SKIPPED |= {"this", "__phello__", "f2py", "msilib", "site-packages", "dist-packages", "__pycache__"}
# Entries of a module share a document until it has this many characters, so that BOS and EOS pay off.
DOCUMENT_CHARACTERS = 2000


def build_embedded_corpus(path: str | Path = ROOT / "dataset" / "python_docs.jsonl") -> Path:
    """Writes the corpus to `path` as jsonl, in some seconds, unless it exists; returns the path.

    The same Python and NumPy give the same file.
    """
    return build_once(Path(path), lambda: ({"text": text} for text in documents()))


def build_once(path: Path, lines: Callable[[], Iterable[JsonObject]]) -> Path:
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # One of the ranks that start together builds: a second file would look like an edit.
    with file_lock(path.with_name(f".{path.name}.lock")):
        if not path.is_file():
            with atomic_file(path) as file:
                for line in lines():
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
    return path


def documents() -> Iterator[str]:
    """The texts, in a fixed order and without exact duplicates."""
    yield from dict.fromkeys(chain(_topics(), _modules(LIBRARY, ""), _modules(Path(numpy.__file__).parent, "numpy")))


def _topics() -> Iterator[str]:
    """One document for each topic of the language reference."""
    # Some distributions leave it out.
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        yield from (_clean(text) for _, text in sorted(topics.items()))


def _modules(root: Path, package: str) -> Iterator[str]:
    """The documents of all modules under `root`, in the order of their files."""
    seen: set[str] = set()
    for file, name in source_files(root, package):
        document: list[str] = []
        for entry in entries(file, name):
            # Aliases and overrides repeat a docstring under another name, which is in the first line.
            body = entry.partition("\n")[2]
            if body in seen:
                continue
            seen.add(body)
            document.append(entry)
            if sum(map(len, document)) >= DOCUMENT_CHARACTERS:
                yield "\n\n\n".join(document)
                document = []
        if document:
            yield "\n\n\n".join(document)


def source_files(root: Path, package: str) -> Iterator[tuple[Path, str]]:
    """(file, the dotted name that users know) of the modules under `root`: numpy/linalg/_linalg.py is numpy.linalg, _pydecimal.py
    is decimal."""
    # Sorted: directory listings have another order on every machine.
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED.isdisjoint(parts):
            names = [part.removeprefix("_py") for part in parts]
            public = [name for name in names if not name.startswith("_")] or names[-1:]
            yield file, ".".join([package, *public] if package else public)


def entries(file: Path, name: str) -> Iterator[str]:
    """The entries of a module: itself, functions, classes with their methods, each below its name and signature."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        # Templates and deliberately broken examples.
        return
    # A private module has the name of its package: its docstring would pass for that of the package.
    if name.endswith(file.stem.removeprefix("__init__")) and (doc := _clean(ast.get_docstring(tree) or "")):
        yield f"module {name}\n\n{doc}"
    yield from _definitions(tree.body, name)
    for node in tree.body:
        if isinstance(node, ast.Expr) and (entry := _added_doc(node.value)):
            yield entry


def _definitions(body: Sequence[ast.stmt], prefix: str) -> Iterator[str]:
    """The entries of the functions and classes in a body, including those under an `if` or a `try`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body, prefix)
        # Private names are left out, but not special methods such as __len__.
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or re.match(
            r"_(?!_.*__$)", node.name
        ):
            continue
        doc = _clean(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            if doc:
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                yield f"class {prefix}.{node.name}({bases})\n\n{indent(doc, '    ')}"
            yield from _definitions(node.body, f"{prefix}.{node.name}")
        elif doc:
            yield f"{prefix}.{node.name}({ast.unparse(node.args)})\n\n{indent(doc, '    ')}"


def _added_doc(call: ast.expr) -> str | None:
    """The entry of NumPy's add_newdoc(module, name, text or (method, text)), which documents C code."""
    if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "add_newdoc" and len(call.args) == 3):
        return None
    try:
        module, name, doc = (ast.literal_eval(argument) for argument in call.args)
    except ValueError:
        # The text is built at run time.
        return None
    if isinstance(doc, tuple):
        method, doc = doc
        name = f"{name}.{method}"
    # Users know these functions by the package that re-exports them.
    module = module.replace("._core.multiarray", "").replace("._core.umath", "")
    return f"{module}.{name}\n\n{indent(_clean(inspect.cleandoc(doc)), '    ')}"


def _clean(text: str) -> str:
    """No trailing blanks, no control characters, at most one empty line in a row."""
    text = re.sub(r"[^\S\n]+\n", "\n", text.expandtabs().replace("\r\n", "\n"))
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).lstrip("\n").rstrip()


# ----------------------------------------------------------------------------------------------------- questions

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
