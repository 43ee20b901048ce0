"""The error that ends a command in one line. It imports nothing, so that flags are read before torch is there."""


class UserError(ValueError):
    """Something the user can mend: shown as one line, exit code 2, no traceback."""
