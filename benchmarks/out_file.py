"""The file that a benchmark writes what it has found to."""

from pathlib import Path

from common.errors import UserError, user_errors


def check_out(path: Path) -> None:
    """See that the file of --out can be written, before the minutes of work that fill it; its folder is made.

    Errors: UserError.
    """
    try:
        with user_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            # What an earlier run has found stays until there is something new.
            open(path, "a", encoding="utf-8").close()
    except UserError as error:
        raise UserError(f"--out {path} cannot be written ({error}); name a file") from error
