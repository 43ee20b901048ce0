"""What `--sample_prompts` names: prompts, or a file of them."""

import contextlib
from pathlib import Path

from common.errors import UserError


def read_prompts(arguments: list[str]) -> list[str]:
    """The prompts of --sample_prompts: the strings themselves, or the lines of a file that is named alone.

    Errors: UserError for a file without prompts, and for what is not UTF-8 (a shell hands over any bytes): now and not at the
    first evaluation.
    """
    prompts = arguments
    path = Path(arguments[0]) if len(arguments) == 1 else None
    is_file = False
    # A text may be too long for the name of a file.
    with contextlib.suppress(OSError):
        is_file = path is not None and (path.suffix == ".txt" or path.is_file())
    if path is not None and is_file:
        try:
            prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"--sample_prompts {path}: no UTF-8 text can be read from there ({reason})") from None
        if not prompts:
            raise UserError(f"--sample_prompts {path}: no prompt in there; one a line is wanted")
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"--sample_prompts: {ascii(prompt)[:80]} is not UTF-8") from None
    return prompts
