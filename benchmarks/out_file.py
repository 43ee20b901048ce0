"""The file that a benchmark writes what it has found to."""

from pathlib import Path
from typing import IO

from common.errors import UserError, user_errors


def check_out(path: Path) -> None:
    """See that the file of --out can be written, before the minutes of work that fill it; its folder is made.

    Errors: UserError.
    """
    try:
        with user_errors():
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True)
                print(f"--out: made the folder {path.parent}")
            # What an earlier run has found stays until there is something new.
            open(path, "a", encoding="utf-8").close()
    except UserError as error:
        raise UserError(f"--out {path} cannot be written ({error}); name a file") from error


def opened(path: Path) -> IO[str]:
    """The file of --out, empty. Errors: UserError."""
    check_out(path)
    return open(path, "w", encoding="utf-8")
