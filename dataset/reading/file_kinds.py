"""Which files are data, and of what kind: by the end of their names alone. What lies behind an address is fetched here."""

import argparse
import glob
import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from common.errors import DataError, optional_package
from common.files import file_lock, user_cache
from common.wording import announce
from dataset.reading.streams import COMPRESSIONS

# fsspec's AbstractFileSystem, which has no types
FileSystem = Any

# Files of one document a line, row or object. Those of CORPORA are surely meant as data; beside them a folder's .csv,
# .json and text files are rather descriptions (README.md, dataset_info.json), and in a folder of source code .json and
# .csv files are rather settings.
CORPORA = (".jsonl", ".parquet", ".arrow")
TABLES = (".csv", ".tsv", ".json")
# The kinds of files whose lines or entries are objects of any form.
OBJECTS = (".jsonl", ".json")

# Other names of the same format.
ALIASES = {".ndjson": ".jsonl"}

# Read as plain text, the whole file a document.
TEXT_SUFFIXES = (
    ".txt", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".css", ".sql",
    ".py", ".pyi", ".rb", ".pl", ".lua", ".php", ".sh", ".bash", ".r", ".jl",
    ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".cs", ".go", ".rs", ".swift",
    ".java", ".kt", ".scala", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".hs", ".ml",
)  # fmt: skip
# They compress by themselves.
UNCOMPRESSED = (".parquet", ".arrow")

ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
# the package that fsspec needs for each scheme
SCHEMES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}
# A web server that sends nothing for so long has failed. A whole file may take as long as it takes.
SILENCE_S = 60

# Folders at the top of a disk that only the system may read
KEPT_BY_SYSTEMS = ("lost+found", "System Volume Information")

READABLE = (
    "files that are read: .jsonl, .ndjson, .json, .csv, .tsv and text such as .txt, .md, .py (--text_suffixes), each also as "
    ".gz, .bz2, .xz or .zst; .parquet, .arrow"
)
TEXT_SUFFIXES_HELP = (
    "files that are read as plain text, beside .txt: suffixes such as .py .md, read in every folder (default: those of "
    "common programming and markup languages, in folders without .jsonl, .parquet and .arrow files)"
)


@dataclass(frozen=True)
class FileKind:
    """suffix: of CORPORA or TABLES, or any other for plain text. compression: of COMPRESSIONS, or none."""

    suffix: str
    compression: str = ""

    @property
    def is_text(self) -> bool:
        return self.suffix not in CORPORA + TABLES


def kind_of(path: Path) -> FileKind:
    """What the name of a file says. A suffix that is not known stands for plain text: the user named it as such."""
    # Two suffixes at most: `a.jsonl.gz` is jsonl, and in `a.gz.txt` the .gz means nothing.
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    stem = name.removesuffix(compression)
    suffix = Path(stem).suffix
    return FileKind(ALIASES.get(suffix, suffix), compression)


def text_suffix(value: str) -> str:
    """A value of --text_suffixes: `.py`, or `py` for short."""
    suffix = "." + value.lower().removeprefix(".")
    formats = CORPORA + TABLES + COMPRESSIONS + tuple(ALIASES)
    if not re.fullmatch(r"\.[^./\\\s]+", suffix) or suffix in formats:
        raise argparse.ArgumentTypeError(f"{value!r} ends no plain text: .py does, .jsonl has a format of its own")
    return suffix


def is_address(path: str) -> bool:
    """Whether a path of --data_path is read through fsspec."""
    found = ADDRESS.match(path)
    return found is not None and found.group(1).lower() in SCHEMES


def find_files(data_path: str, text_suffixes: Sequence[str] | None = None, cache_dir: str | None = None) -> list[Path]:
    """The data files of a file, a folder (all levels, hidden folders left out) or a glob, sorted by path.

    A folder or glob gives the first of these that it has: CORPORA and .txt; text of the default suffixes; TABLES.
    text_suffixes, of the user, are read wherever they are found. What a run of ours, a token store or a model has left
    in the folder is no data. What lies behind an address is fetched now; cache_dir: where it goes, None: the user's cache folder.
    """
    return choose_files(data_path, text_suffixes, cache_dir).read


class Choice(NamedTuple):
    """The files of a path that are read, and those that are left out."""

    read: list[Path]
    left_out: list[Path]


def choose_files(data_path: str, text_suffixes: Sequence[str] | None, cache_dir: str | None) -> Choice:
    """What `find_files` reads and leaves out, sorted by path. A README or a license is in neither, unless it is read."""
    data_path = str(data_path).removeprefix("file://")
    is_remote = is_address(data_path)
    if ADDRESS.match(data_path) and not is_remote:
        raise DataError(f"{data_path}: it is not on this machine; download it first and name the copy")
    path = Path(urlsplit(data_path).path) if is_remote else expanded(data_path)
    # A file that was named is read whatever lies beside it; the choice is for folders and patterns.
    is_file = is_remote or os.path.isfile(path)
    found = [path] if is_file else _files_of(path)
    asked = (".txt", *(text_suffixes or ()))
    kinds: dict[Path, FileKind] = {}
    for file in found:
        kind = kind_of(file)
        if kind.suffix in CORPORA + TABLES + TEXT_SUFFIXES + asked and not (
            kind.compression and kind.suffix in UNCOMPRESSED
        ):
            kinds[file] = kind
            if not is_file:
                _refuse_what_is_no_file(file)
    if is_file:
        if not kinds:
            of_address = "a folder or a pattern is to be downloaded first; " if is_remote else ""
            raise DataError(f"{data_path}: unknown kind of file; {of_address}{READABLE}")
        return Choice([_fetched(data_path, cache_dir) if is_remote else path], [])
    # A user who names suffixes has chosen, and so has one who keeps a corpus there. Otherwise it must be guessed whether
    # the tables are the data and the texts describe them, or the texts are source code and the tables its settings.
    wanted = [file for file, kind in kinds.items() if kind.suffix in CORPORA]
    if wanted or text_suffixes:
        wanted += [file for file, kind in kinds.items() if kind.suffix in asked]
    else:
        wanted = [file for file, kind in kinds.items() if kind.is_text]
        # A README or a license beside tables does not make the folder one of texts.
        if all(map(_is_about_others, wanted)):
            wanted = [file for file, kind in kinds.items() if kind.suffix in TABLES] or wanted
    if not wanted:
        raise DataError(f"{path}: nothing to read there; {READABLE}")
    read = set(wanted)
    left_out = [file for file in found if file not in read and not _is_about_others(file)]
    return Choice(sorted(wanted, key=Path.as_posix), sorted(left_out, key=Path.as_posix))


def _file_system(scheme: str) -> FileSystem:
    """What reads such addresses. Errors: DataError where a package is missing, which the line names."""
    package = SCHEMES[scheme]
    optional_package(package, f"to read {scheme}:// addresses")
    options: dict[str, Any] = {}
    if package == "aiohttp":
        from aiohttp import ClientTimeout

        # The bytes of the file as they are; and by itself it would give a whole file five minutes.
        timeout = ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        options = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"timeout": timeout}}
    # Not by the address as a whole: fsspec would follow what it calls a chain of addresses.
    return optional_package("fsspec", f"to read {scheme}:// addresses").filesystem(scheme, **options)


# A file is fetched whole before it is read, and stays. fsspec's own cache takes a changed file behind http:// for the old one.
def _fetched(address: str, cache_dir: str | None) -> Path:
    """The copy of the file behind an address on this machine, in `downloads/` of the cache folder, fetched now if this version
    is not there. Errors: DataError."""
    system = _file_system(address.partition("://")[0].lower())
    try:
        system.invalidate_cache()
        info = system.info(address)
        if info["type"] != "file":
            raise FileNotFoundError(address)
        size, tags = version = _version(info)
        key = hashlib.sha256(json.dumps([address, *version]).encode()).hexdigest()[:16]
        folder = (expanded(cache_dir) if cache_dir else user_cache()) / "downloads" / key
        copy = folder / Path(urlsplit(address).path).name
        folder.mkdir(parents=True, exist_ok=True)
        # One of the ranks that start together fetches.
        with file_lock(folder / ".lock"):
            if not (tags and copy.exists()):
                announce(f"fetching {address}")
                part = copy.with_name(f".{copy.name}.part")
                system.get_file(address, str(part))
                system.invalidate_cache()
                if size not in (None, part.stat().st_size) or _version(system.info(address)) != version:
                    raise OSError("it was cut off, or changed while it was fetched; start again")
                os.replace(part, copy)
        return copy
    except Exception as error:
        # botocore and aiohttp have errors of their own.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, FileNotFoundError):
            reason = "no such file or server; a folder or a pattern is to be downloaded first"
        raise DataError(f"{address}: cannot be read ({reason})") from None


def _version(info: dict[str, Any]) -> tuple[int | None, list[str]]:
    """(size, the first tag that a server gives of a file's version); None and no tag where it does not tell."""
    tags = [str(info[tag]) for tag in ("ETag", "Content-MD5", "Last-Modified", "mtime") if info.get(tag)]
    return info.get("size"), tags[:1]


def _is_about_others(file: Path) -> bool:
    """Whether a file tells of those beside it, and is no data itself."""
    return bool(re.match(r"(readme|licen[cs]e|copying|notice)\b", file.name, re.IGNORECASE))


def _files_of(path: Path) -> list[Path]:
    """The files of a folder, or of all that a glob matches. Errors: DataError for none.

    A folder that a glob matches is read as if it had been named: the shell would hand it over so.
    """
    matches = [path] if os.path.isdir(path) else _matches_of(path)
    if matches == [path] and not os.path.isdir(path):
        _refuse_what_is_no_file(path)
    if not matches:
        share = ", and no share such as :0.7, :0.7..0.2 or :0.7:x4 ends it" if ":" in path.name else ""
        reason = f"no such file or folder{share}, and no file matches it as a pattern; {READABLE}"
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            # ValueError: a NUL character, which is in the name of no file.
            pass
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        raise DataError(f"{path}: {reason}")
    # A dict, since `data/**` matches a file by itself and within its folder.
    found: dict[Path, None] = {}
    for match in matches:
        if not match.is_dir():
            found[match] = None
            continue
        below: list[Path] = []
        seen = set()
        # os.walk follows links, as rglob does not: a corpus is often a folder of links to other disks. A folder that is met
        # twice, by a link to itself or to one above, is read once.
        for place, folders, names in os.walk(match, onerror=_refuse_folder, followlinks=True):
            real = os.path.realpath(place)
            # In place: os.walk goes on with what is left in the list.
            folders[:] = [name for name in folders if not name.startswith(".") and real not in seen]
            if real not in seen:
                below += [Path(place, name).relative_to(match) for name in names if not name.startswith(".")]
            seen.add(real)
        there = set(below)
        found |= {match / file: None for file in below if not is_own_output(file, there)}
    return list(found)


def _refuse_folder(error: OSError) -> None:
    """For a folder that os.walk cannot read. Errors: DataError, since part of a corpus would be missing."""
    if Path(error.filename).name not in KEPT_BY_SYSTEMS:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def _matches_of(pattern: Path) -> list[Path]:
    """What a glob matches; a file that `**` comes to on several ways, by links to folders above it, once."""
    # A folder whose very name has brackets is meant by that name.
    fixed = Path(pattern.anchor)
    parts = list(pattern.relative_to(fixed).parts)
    while parts and os.path.exists(fixed / parts[0]):
        fixed /= parts.pop(0)
    matches = glob.glob(str(Path(glob.escape(str(fixed)), *parts)), recursive=True)
    if "**" not in parts:
        return [Path(match) for match in matches]
    return [Path(match) for match in {os.path.realpath(match): match for match in reversed(matches)}.values()]


def expanded(path: str | Path) -> Path:
    """The path with its ~ replaced, as a shell does it: that of nobody's home stays as it is."""
    return Path(os.path.expanduser(path))


def _refuse_what_is_no_file(path: Path) -> None:
    """Errors: DataError for a name of data that holds none: a link to nothing, a pipe. Part of a corpus would be missing."""
    if not path.is_file():
        raise DataError(
            f"{path}: a link to what is not there (is a disk not mounted?), or a pipe: write it to a file first"
        )


def is_own_output(below: Path, there: Collection[Path]) -> bool:
    """Whether a run, a token store, a model or a cache has left the file where data lies too.

    below: its path from the folder that was named. there: those of all files of the folder.
    """
    # The last is of map() and shuffle() of Hugging Face datasets: the same texts once more, or numbers of rows.
    names = r"(?s).*\.(metrics\.jsonl|report\.html|settings\.yaml|plan\.yaml)|hashes\.json|cache-[0-9a-f]{16}\w*\.arrow"
    if re.fullmatch(names, below.name):
        return True
    # The settings of a model stand beside its weights.
    if below.suffix == ".json" and below.with_suffix(".pth") in there:
        return True
    # Below the folder that was named alone: whatever that one is called, the user wants what is in it.
    if any(re.search(r"_resume(_old\d*)?$", folder) for folder in below.parts[:-1]):
        return True
    # files that tell a token store, a model, a tokenizer
    marks = (("meta.json", "tokens.bin"), ("config.json", "model.safetensors"), ("tokenizer_config.json",))
    return any(all(below.with_name(name) in there for name in names) for names in marks)
