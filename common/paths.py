"""Where the repository is, and paths that libraries take."""

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
