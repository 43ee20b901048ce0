"""Errors that the user can fix. They end a command with one line and exit code 2."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from common.wording import loader_error_reason


class UserError(ValueError):
    """Something that the user can fix: a flag, a file, something missing on the machine."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of the traceback: IPython looks for this name."""
        return [f"error: {self}"]


class PrintedByAnotherRank(UserError):
    """Ends this rank silently: another rank has the error and prints it."""


class DataError(UserError):
    """Something in the data that its owner can fix: one line with the location, the problem and the fix."""


class LoaderError(RuntimeError):
    """No further batch can be made; one line says why. is_data_fault: the token store has to be rebuilt."""

    def __init__(self, message: str, is_data_fault: bool = False) -> None:
        super().__init__(message)
        self.is_data_fault = is_data_fault


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn ValueErrors and OSErrors of set-up code (a config field, a file) into UserErrors.

    Not for the training loop: there a ValueError is a bug of ours and keeps its traceback.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        # str() would start with [Errno 13].
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UserError(message) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def is_panic(error: BaseException) -> bool:
    """Returns whether code in Rust has panicked, such as that of tokenizers: this is no Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn whatever a library raises, each with classes of its own, into a UserError. what: what failed, with its file."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise UserError(f"{what} ({loader_error_reason(error)})") from error


def utf8(text: str, what: str = "the prompt") -> str:
    """The text, checked: a shell or a pipe may pass any bytes. what: its name. Errors: UserError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{what} {ascii(text)[:200]} is not UTF-8") from None
    return text


def optional_package(module: str, purpose: str, package: str | None = None) -> ModuleType:
    """Import an optional dependency. package: pip's name. Errors: DataError with the pip command, whatever the import raises."""
    package = package or module.split(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise DataError(f"{error}: the package {package} is needed {purpose}: pip install {package}") from error
