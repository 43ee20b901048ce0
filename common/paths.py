"""Where the repository is, and paths that libraries take."""

import os
from pathlib import Path

from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def utf8_folder(flag: str, path: str | Path) -> Path:
    """The folder, if its whole path is UTF-8: the libraries that read and write exports take no other. UserError."""
    try:
        str(Path(path).absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"{flag} {ascii(str(path))}: the path is not UTF-8; rename the folder or use another") from None
    return Path(path)


def user_cache() -> Path:
    """The folder for what is kept for the user and can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minimind"
