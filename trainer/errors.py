"""Errors of the trainers. Nothing is imported here, so that flags are read before torch is there."""


class UserError(ValueError):
    """Something the user can mend: shown as one line, exit code 2, no traceback."""


class BadContentError(ValueError):
    """What is wrong with a checkpoint whose digest holds; an older one is taken in its place."""
