"""A corpus that every machine has: the documentation inside the installed Python.

The language reference (`pydoc_data.topics`) and the docstrings of the standard library and NumPy, read out of their
source files without importing or running any of them. It is there so that training works at once; dataset/README.md
says how to get a full corpus.
"""

import ast
import importlib.util
import inspect
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from common.files import atomic_file, file_lock

# Parts of paths: tests, what is gone in newer Pythons or is there on some systems only, jokes, and other people's code.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "distutils", "encodings", "pydoc_data", "antigravity"}
SKIPPED |= {"this", "__phello__", "f2py", "msilib", "site-packages", "dist-packages", "__pycache__"}
# Entries of a module share a document until it has so many characters.
DOCUMENT_CHARACTERS = 2000

# A line of a jsonl.
Record = dict[str, object]
# What ast.get_docstring reads.
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def build_embedded_corpus(path: str | Path) -> Path:
    """Writes the corpus to `path` as jsonl, which takes some seconds, unless it is there; returns the path.

    The same Python and NumPy give the same file.
    """
    return build_once(Path(path), _records)


def _records() -> Iterator[Record]:
    for text in documents():
        yield {"text": text}


def build_once(path: Path, records: Callable[[], Iterable[Record]]) -> Path:
    """Writes the records to `path` as jsonl, unless it is there; returns the path."""
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of ranks that start together one builds: a second file would look like an edit.
    with file_lock(path.with_name(f".{path.name}.lock")):
        if not path.is_file():
            with atomic_file(path) as file:
                for record in records():
                    line = json.dumps(record, ensure_ascii=False) + "\n"
                    file.write(line.encode())
    return path


def documents() -> Iterator[str]:
    """The texts, in a fixed order and without exact duplicates."""
    library = _library()
    # Found, not imported: the corpus comes from the text of the source files alone.
    found = importlib.util.find_spec("numpy")
    assert found is not None and found.origin is not None
    numpy = Path(found.origin).parent
    topics = _topics(library / "pydoc_data" / "topics.py")
    seen: set[str] = set()
    for text in chain(topics, _packages(library, ""), _packages(numpy, "numpy")):
        if text not in seen:
            seen.add(text)
            yield text


def library_entries() -> Iterator[str]:
    """What the standard library documents, in a fixed order: the name, for a function with its signature, and the text."""
    for file, name in _files(_library(), ""):
        yield from _module(file, name)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _topics(path: Path) -> Iterator[str]:
    """One document for each topic of the language reference."""
    # Some distributions leave it out.
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Dict):
            topics = ast.literal_eval(node)
            for name in sorted(topics):
                yield _clean(topics[name])
            # The file holds this one dictionary.
            return


def _packages(root: Path, package: str) -> Iterator[str]:
    """The documents of all modules under `root`, in the order of their files."""
    seen: set[str] = set()
    for file, name in _files(root, package):
        yield from _group(_new_entries(_module(file, name), seen))


def _files(root: Path, package: str) -> Iterator[tuple[Path, str]]:
    """(file, dotted name) of the modules under `root`."""
    # Sorted: a folder lists its files in another order on every machine.
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED.isdisjoint(parts):
            yield file, _public_name(package, parts)


def _public_name(package: str, parts: tuple[str, ...]) -> str:
    """The dotted name that users know: numpy/linalg/_linalg.py is numpy.linalg, _pydecimal.py is decimal."""
    names = [part.removeprefix("_py") for part in parts]
    public = [name for name in names if not name.startswith("_")] or names[-1:]
    return ".".join([package, *public] if package else public)


def _new_entries(entries: Iterator[str], seen: set[str]) -> Iterator[str]:
    """Those whose text has not come before: aliases and overrides repeat a docstring under another name."""
    for entry in entries:
        # The first line is the name with its signature.
        _, _, body = entry.partition("\n")
        if body not in seen:
            seen.add(body)
            yield entry


def _group(entries: Iterator[str]) -> Iterator[str]:
    """Joins neighbouring entries so that a document is worth its BOS and EOS."""
    group: list[str] = []
    size = 0
    for entry in entries:
        group.append(entry)
        size += len(entry)
        if size >= DOCUMENT_CHARACTERS:
            yield "\n\n\n".join(group)
            group = []
            size = 0
    if group:
        yield "\n\n\n".join(group)


def _module(file: Path, name: str) -> Iterator[str]:
    """The entries of a module: itself, functions, classes with their methods, each after its name and signature."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        # Templates and deliberately broken examples.
        return
    # A private module is named after its package, whose own text it would seem to be.
    if name.endswith(file.stem.removeprefix("__init__")) and (doc := _docstring(tree)):
        yield f"module {name}\n\n{doc}"
    yield from _definitions(tree.body, name)
    for node in tree.body:
        if isinstance(node, ast.Expr) and (entry := _added_doc(node.value)):
            yield entry


def _definitions(body: Sequence[ast.stmt], prefix: str) -> Iterator[str]:
    """The entries of the functions and classes in a body; what stands under an `if` or a `try` counts too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _public(node.name):
            if doc := _docstring(node):
                yield f"{prefix}.{node.name}({ast.unparse(node.args)})\n\n{_indent(doc)}"
        elif isinstance(node, ast.ClassDef) and _public(node.name):
            if doc := _docstring(node):
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                yield f"class {prefix}.{node.name}({bases})\n\n{_indent(doc)}"
            yield from _definitions(node.body, f"{prefix}.{node.name}")
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body, prefix)


def _docstring(node: Documented) -> str:
    return _clean(ast.get_docstring(node) or "")


def _added_doc(call: ast.expr) -> str | None:
    """NumPy documents what is written in C by add_newdoc(module, name, text or (method, text))."""
    if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "add_newdoc" and len(call.args) == 3):
        return None
    try:
        module, name, doc = (ast.literal_eval(argument) for argument in call.args)
    except ValueError:
        # A text that is put together at run time.
        return None
    if isinstance(doc, tuple):
        method, doc = doc
        name = f"{name}.{method}"
    # Users know these functions by the package that hands them on.
    module = module.replace("._core.multiarray", "").replace("._core.umath", "")
    return f"{module}.{name}\n\n{_indent(_clean(inspect.cleandoc(doc)))}"


def _public(name: str) -> bool:
    """Whether users are meant to know the name: a special method such as __len__ is."""
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _clean(text: str) -> str:
    """No trailing blanks, no control characters, at most one empty line in a row."""
    text = re.sub(r"[^\S\n]+\n", "\n", text.expandtabs().replace("\r\n", "\n"))
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).lstrip("\n").rstrip()


def _indent(text: str) -> str:
    """The text with four blanks before each line that is not empty."""
    return re.sub(r"^(?=[^\n])", "    ", text, flags=re.MULTILINE)
