"""What to say where weights are missing: which ones there are instead, and the flags that take them."""

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

# A line holds no more.
MOST_NAMED = 3
# The end of a weight's name, see `weight_name`.
WIDTH_AND_KIND = re.compile(r"_([0-9]{1,6})(_moe)?$")


def weights_instead(*folders: Path, first: str = "", flags_of: Callable[[Path], str] | None = None) -> str:
    """As "there is out/pretrain_256.pth (--from_weight out/pretrain_256.pth --hidden_size 256)", a part of a line.

    Those of the first of the folders that has some. first: names like it come first, then the newest of the
    others. flags_of: of a weight those that take it; None: its path says enough.
    """
    found: list[Path] = []
    for folder in folders:
        found = found or weights_in(folder, first)
    if not found:
        return f"{from_here(folders[-1])} has no weights yet: make pretrain or trainer/train_pretrain.py trains some"
    named = []
    for path in found[:MOST_NAMED]:
        flags = "" if flags_of is None else f" ({flags_of(path)})"
        named.append(f"{from_here(path)}{flags}")
    if len(found) > MOST_NAMED:
        named.append(f"and {len(found) - MOST_NAMED} more")
    return f"{'there is' if len(found) == 1 else 'there are'} {', '.join(named)}"


def weights_in(folder: Path, first: str = "") -> list[Path]:
    """The .pth files of a folder: those with names like `first`, then the others, each from the newest on."""
    found: list[tuple[bool, float, Path]] = []
    try:
        for path in folder.iterdir():
            # MiniMind's own trainer keeps its checkpoints beside the weights.
            if path.suffix == ".pth" and not path.stem.endswith("_resume") and path.is_file():
                is_like = bool(difflib.get_close_matches(first, [path.stem]))
                found.append((is_like, path.stat().st_mtime, path))
    except OSError:
        # No folder, or one that others may read.
        return []
    return [path for _, _, path in sorted(found, reverse=True)]


def from_here(path: Path) -> Path:
    """The path as one would type it in the current folder."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


def flags_of_trainer(path: Path, asked: Mapping[str, object]) -> str:
    """What a trainer is told to go on from a weight. asked: the model's shape without further flags."""
    words = ["--from_weight", str(from_here(path))]
    found = WIDTH_AND_KIND.search(path.stem)
    # The trainer itself reads the shape in a .json beside the weight. MiniMind's own have it in their names alone.
    if found and not path.with_suffix(".json").is_file():
        for name, value in (("hidden_size", int(found[1])), ("use_moe", int(found[2] is not None))):
            if asked.get(name) != value:
                words += [f"--{name}", str(value)]
    return shlex.join(words)
