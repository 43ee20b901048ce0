"""The errors that a person can act on. They end a command with one line and exit code 2."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType


class UserError(ValueError):
    """Something that the user can mend: a flag, a file, a machine that lacks something."""


class SaidByAnotherRank(UserError):
    """Ends this rank without a line of its own: another rank has the error, and prints it."""


class DataError(UserError):
    """Something in the data that its owner can mend: one line that says where, what and how."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn the ValueErrors and OSErrors of setting up (a config field, a file) into UserErrors.

    Used around set-up code only: inside the training loop a ValueError is a defect of ours and keeps its traceback.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        # str() would begin with [Errno 13].
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UserError(message) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def optional_package(module: str, purpose: str, package: str | None = None) -> ModuleType:
    """A module that only some users need, or a DataError that says what to install, also where its own code fails. package: pip's name."""
    package = package or module.split(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise DataError(f"{error}: the package {package} is needed {purpose}: pip install {package}") from error
