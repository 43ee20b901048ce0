"""Finds data files and their kinds by their names."""

import argparse
import contextlib
import errno
import functools
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError
from common.wording import counted
from dataset.reading.streams import COMPRESSIONS

# Files with one document per line, row or object. CORPORA are surely data; a .csv, .json or text file beside them probably
# describes them (README.md, dataset_info.json), and a .json or .csv in a folder of source code probably holds settings.
CORPORA = (".jsonl", ".parquet", ".arrow")
TABLES = (".csv", ".tsv", ".json")

# Other names of the same format.
ALIASES = {".ndjson": ".jsonl"}

# Plain text, one document per file
TEXT_SUFFIXES = (
    ".txt", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".css", ".sql",
    ".py", ".pyi", ".rb", ".pl", ".lua", ".php", ".sh", ".bash", ".r", ".jl",
    ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".cs", ".go", ".rs", ".swift",
    ".java", ".kt", ".scala", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".hs", ".ml",
)  # fmt: skip
# Formats that compress inside; `.parquet.gz` and the like are not read.
COMPRESSED_INSIDE = (".parquet", ".arrow")

# files that `save_to_disk` of Hugging Face datasets writes
FILE_OF_DATASET = re.compile(r"data-\d+-of-\d+\.arrow|dataset_info\.json|state\.json")
# Folders of packages, and of build output where a project has one of these files
PACKAGES = ("node_modules", "site-packages")
BUILDS = ("build", "dist", "target", "vendor", "obj", "_build", "coverage")
PROJECT = re.compile(
    r"package.json|pyproject.toml|setup.(py|cfg)|CMakeLists.txt|Makefile|Cargo.toml|pom.xml|build.gradle.*|go.mod|"
    r"composer.json|.*\.csproj"
)
# Scripts without line ends are made from others.
MINIFIED, MAX_SCRIPT_LINE = (".js", ".mjs", ".css"), 5000
# Words in the names of what public data sets hold out
HELD_OUT = re.compile(r"(?<![a-z])(test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)
# folders at the top of a disk that only the system may read
SYSTEM_FOLDERS = ("lost+found", "System Volume Information")

READABLE = (
    "files that are read: .jsonl, .ndjson, .json, .csv, .tsv and text such as .txt, .md, .py (other plain text: by "
    "--text_suffixes; tables and JSON: by their right suffix; PDF and Word: save them as text), each also as .gz, .bz2, .xz or .zst; .parquet, .arrow"
)
TEXT_SUFFIXES_HELP = (
    "suffixes of files to read as plain text in every folder, besides .txt, such as .py .md (default: those of "
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

    @property
    def is_source(self) -> bool:
        """True for source code and markup."""
        return self.suffix in TEXT_SUFFIXES and self.suffix != ".txt"


def kind_of(path: Path) -> FileKind:
    """The kind of a file by its name. Any other suffix means plain text, which is read only if the suffix is known or in
    --text_suffixes."""
    # Two suffixes at most: `a.jsonl.gz` is jsonl, and in `a.gz.txt` the .gz means nothing.
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    stem = name.removesuffix(compression)
    suffix = Path(stem).suffix
    if compression and suffix in COMPRESSED_INSIDE:
        return FileKind(compression)
    return FileKind(ALIASES.get(suffix, suffix), compression)


def text_suffix(value: str) -> str:
    """A value of --text_suffixes: `.py`, or `py` for short."""
    suffix = "." + value.lower().removeprefix(".")
    formats = CORPORA + TABLES + COMPRESSIONS + tuple(ALIASES)
    if not re.fullmatch(r"\.[^./\\\s]+", suffix) or suffix in formats:
        raise argparse.ArgumentTypeError(
            f"{value!r} is no suffix of plain text such as .py (.jsonl has a format of its own)"
        )
    return suffix


def find_files(data_path: str, text_suffixes: Sequence[str] | None = None) -> list[Path]:
    """The data files of a file, a folder (recursive, without hidden folders) or a glob, sorted by path.

    A folder or glob yields the first of these groups that it has: CORPORA and .txt; text of the default suffixes; TABLES.
    text_suffixes, given by the user, are always read. Files that a run, a token store or a model left in the folder are
    skipped.
    """
    return choose_files(data_path, text_suffixes)[0]


def choose_files(data_path: str, text_suffixes: Sequence[str] | None = None) -> tuple[list[Path], list[str]]:
    """(files that `find_files` reads, lines on what is left out). An unread README or license needs none."""
    data_path = str(data_path).removeprefix("file://")
    # One letter would be a drive of Windows.
    if re.match(r"[A-Za-z][\w+.-]+://", data_path):
        raise DataError(
            f"{data_path}: it is not on this machine; download it first (aws s3 cp, curl -LO, hf download) and name the copy"
        )
    path = expand_user(data_path)
    always_read = (".txt", *(text_suffixes or ()))
    known = CORPORA + TABLES + TEXT_SUFFIXES + always_read
    # Only folders and patterns need a choice: a named file is read if its kind is known.
    if os.path.isfile(path):
        if kind_of(path).suffix not in known:
            raise DataError(f"{data_path}: unknown kind of file; {READABLE}")
        return [path], []
    foreign: set[Path] = set()
    files = _files_of(path, foreign)

    def files_with(suffixes: Collection[str]) -> list[Path]:
        return [file for file in files if kind_of(file).suffix in suffixes]

    for file in files_with(known):
        # Without it part of the corpus would be missing.
        if not file.is_file():
            raise DataError(f"{file}: a broken link (is a disk not mounted?), or a pipe: write it to a file first")
    # Suffixes from the user, or a corpus, settle the choice. Otherwise guess: either the tables are data and the texts
    # describe them, or the texts are source code and the tables its settings.
    chosen = files_with(CORPORA)
    if chosen or text_suffixes:
        chosen += files_with(always_read)
    else:
        chosen = files_with(TEXT_SUFFIXES)
        # A README or a license beside tables does not make it a folder of texts.
        if all(map(_is_readme_or_license, chosen)):
            chosen = files_with(TABLES) or chosen
    if not chosen:
        advice = f"{min(foreign)} is left out unless you name its own path" if foreign else READABLE
        raise DataError(f"{path}: nothing to read there; {advice}")
    # All of them are meant, if there is nothing else.
    data = [file for file in chosen if not _is_minified(file)] or chosen
    foreign.update(set(chosen).difference(data))
    # A pattern may spell the name of such a folder, and read it.
    foreign.difference_update(folder for file in data for folder in file.parents)
    lines = []
    if foreign:
        shown = ", ".join(sorted(map(str, foreign))[:4]) + f" and {len(foreign) - 4:,} more" * (len(foreign) > 4)
        lines.append(
            f"{data_path}: packages, build output and minified files left out: {shown}; to read one, name its own path"
        )
    left_out = [file for file in set(files).difference(chosen) if not _is_readme_or_license(file)]
    if left_out:
        suffixes = ", ".join(sorted({kind_of(file).suffix for file in data}))
        lines.append(
            f"{data_path}: {counted(len(data), 'file')} read ({suffixes}), {len(left_out):,} of other kinds (such as "
            f"{min(left_out, key=Path.as_posix).name}) left out; name files by their own paths to read others"
        )
    return sorted(data, key=Path.as_posix), lines


def _is_readme_or_license(file: Path) -> bool:
    return bool(re.match(r"readme(?![a-z])|(licen[cs]e|copying)\b|notice(\.\w+)?$", file.name, re.IGNORECASE))


def _is_minified(file: Path) -> bool:
    if kind_of(file).suffix not in MINIFIED or file.stat().st_size <= MAX_SCRIPT_LINE:
        return False
    with file.open("rb") as script:
        return any(len(line) > MAX_SCRIPT_LINE for line in script.read(4 * MAX_SCRIPT_LINE).splitlines())


def _files_of(path: Path, foreign: set[Path]) -> list[Path]:
    """The files of a folder, or of all matches of a glob. foreign: as in `_walk`. Errors: DataError if there are none.

    A folder that a glob matches is read like a named one, unless it is foreign.
    """
    matches = [path] if os.path.isdir(path) else _matches_of(path, foreign)
    if not matches and not foreign:
        raise DataError(f"{path}: {_why_nothing_is_there(path)}")
    files: list[Path] = []
    seen: set[str] = set()
    for match in matches:
        if not match.is_dir():
            files.append(match)
            continue
        walk = _walk(match, seen, foreign)
        below = [Path(folder, name).relative_to(match) for folder, names in walk for name in names]
        all_files = set(below)
        files += [match / file for file in below if not is_output(file, all_files)]
    # A pattern may match a file, its folder, and links to one of its folders: the first counts.
    real_path = functools.cache(os.path.realpath)
    first: dict[tuple[str, str], Path] = {}
    for file in files:
        first.setdefault((real_path(file.parent), file.name), file)
    return list(first.values())


def _why_nothing_is_there(path: Path) -> str:
    """For a path that is no folder, and as a pattern matches nothing."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: a NUL character, which no file name has.
        pass
    except OSError as error:
        # EINVAL: on Windows no file can have the name of a pattern.
        if error.errno != errno.EINVAL:
            return f"cannot be read ({error.strerror})"
    hint = ""
    if ":" in path.name:
        programs = "train_pretrain.py, train_sft.py and inspect_data.py"
        hint = f" ({programs} take shares in --data_path, written :0.7, :0.7..0.2 or :0.7:x4)"
    return f"no such file or folder{hint}, and no file matches it as a pattern; {READABLE}"


def _walk(top: str | Path, seen: set[str], foreign: set[Path]) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its files) of a folder and those below it, without what is hidden. seen: real paths of folders already
    read. foreign: gets the folders below it that are left out, see `_is_foreign`.

    It follows links, unlike rglob: a corpus is often a folder of links to other disks. A folder that is reached twice, by a
    link to itself or to a parent, is read once.
    """
    for folder, subfolders, names in os.walk(top, onerror=_refuse_folder, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        # Nothing in a __pycache__ can be read.
        below = [name for name in subfolders if not name.startswith((".", "__pycache__"))]
        foreign_names = {name for name in below if _is_foreign(Path(folder, name))}
        foreign.update(Path(folder, name) for name in foreign_names)
        # In place: os.walk descends into what is left in the list. Sorted: which of two links to a folder is followed must not
        # depend on the disk.
        subfolders[:] = sorted(set(below) - foreign_names)
        if "state.json" in names:
            names = _without_old_shards(folder, names)
        yield folder, [name for name in names if not name.startswith(".")]


def _is_foreign(folder: Path) -> bool:
    """True for a folder of packages, a virtual environment, and build output of a project."""
    if folder.name in BUILDS:
        return any(map(PROJECT.fullmatch, os.listdir(folder.parent)))
    return folder.name in PACKAGES or os.path.exists(folder / "pyvenv.cfg")


def _without_old_shards(folder: str, names: list[str]) -> list[str]:
    """The files of a folder of `save_to_disk` of Hugging Face datasets, without descriptions and .arrow files that its
    state.json does not list: an earlier save with more shards leaves the same texts there."""
    try:
        state = json.loads(Path(folder, "state.json").read_bytes())
        listed = {Path(file["filename"]).name for file in state["_data_files"]}
    # Other programs write a state.json too, of any content.
    except Exception:
        return names
    return [name for name in names if name in listed or not FILE_OF_DATASET.fullmatch(name)]


def _refuse_folder(error: OSError) -> None:
    """Errors: DataError for a folder that os.walk cannot read: part of a corpus would be missing."""
    if Path(error.filename).name not in SYSTEM_FOLDERS:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def _matches_of(pattern: Path, foreign: set[Path]) -> list[Path]:
    """The matches of a glob, some of them several times. foreign: gets the folders that its wildcards match and that are left
    out, see `_is_foreign`; those whose names it spells are read."""
    # Brackets in the name of an existing folder are literal.
    fixed = Path(pattern.anchor)
    parts = list(pattern.relative_to(fixed).parts)
    while parts and os.path.exists(fixed / parts[0]):
        fixed /= parts.pop(0)
    matches = [fixed]
    for part in parts:
        if part == "**":
            # Not glob's own `**`, which goes around a loop of links forty times.
            tops = filter(os.path.isdir, matches)
            matches = [Path(folder) for top in tops for folder, _ in _walk(top, set(), foreign)]
        else:
            matches = _entries(matches, part, foreign)
    # A last `**` matches folders and files.
    return matches + _entries(matches, "*", foreign) if parts[-1:] == ["**"] else matches


def _entries(folders: Sequence[Path], part: str, foreign: set[Path]) -> list[Path]:
    """What a part of a pattern matches in some folders. foreign: as in `_matches_of`."""
    # Sorted: of two links to a folder the first is followed, on every disk.
    entries = [folder / name for folder in folders for name in sorted(glob.glob(part, root_dir=folder))]
    if glob.has_magic(part):
        left_out = set(filter(_is_foreign, entries))
        foreign |= left_out
        entries = [entry for entry in entries if entry not in left_out]
    return entries


def notices_on_files(files: Sequence[Path]) -> list[str]:
    """Lines on the files of a run: those that are read several times, and those called as a data set calls what it holds out."""
    # Resolved, so that a file and a link to it count as one.
    counts = Counter(str(file.resolve()) for file in files)
    repeated = "without --deduplicate its documents are repeated that often in an epoch"
    lines = [f"warning: --data_path names {name} {n} times: {repeated}" for name, n in counts.items() if n > 1]
    # Tests of source code are no data of a test.
    names = [os.path.abspath(file) for file in files if not kind_of(file).is_source]
    # ValueError: there is none, or they are on several drives.
    with contextlib.suppress(ValueError):
        top = os.path.commonpath([os.path.dirname(name) for name in names])
        held_out = [os.path.relpath(name, top) for name in names if HELD_OUT.search(name, len(top))]
        if 0 < len(held_out) < len(names):
            lines.append(
                f"warning: trained too: {', '.join(held_out[:4])}{', ...' if held_out[4:] else ''} in {top}; if that is not "
                "meant, name the other files in --data_path, and these in --val_path"
            )
    return lines


def expand_user(path: str | Path) -> Path:
    """The path with ~ expanded as in a shell: the ~ of an unknown user stays."""
    return Path(os.path.expanduser(path))


# What runs, their trackers, and map() and shuffle() of Hugging Face datasets leave in a folder, by its path below the named
# one: the user wants that one, whatever its name. Their caches have the same texts again, or row numbers.
OUTPUT = re.compile(
    r"(.*/)?([^/]*\.(metrics\.jsonl|report\.html|settings\.yaml|plan\.yaml)|hashes\.json|cache-[0-9a-f]{16}\w*\.arrow)"
    r"|(.*/)?([^/]*_resume(_old\d*)?|tokenizer-[0-9a-f]{16}|(wandb|swanlog)/(latest-run|(offline-)?run-[^/]*))/.*",
    re.DOTALL,
)
# Files that identify a token store; a model and a tokenizer, which have further ones of the suffixes below
STORE = ("meta.json", "tokens.bin")
MODELS = (("config.json", "model.safetensors"), ("tokenizer_config.json",))


def is_output(file: Path, all_files: Collection[Path]) -> bool:
    """True for a file that a run, its tracker, a token store, a model or a cache left among the data.

    file: its path below the named folder. all_files: those of all files in it.
    """
    # A model's config is beside its weights.
    if OUTPUT.fullmatch(file.as_posix()) or (file.suffix == ".json" and file.with_suffix(".pth") in all_files):
        return True
    # Files of other kinds beside a model are the user's data.
    is_of_model = file.suffix in (".json", ".txt") or file.name == "README.md"
    marks = (STORE, *MODELS) if is_of_model else (STORE,)
    return any(all(file.with_name(name) in all_files for name in names) for names in marks)
