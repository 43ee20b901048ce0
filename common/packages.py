"""Packages that only some users need, and what loaders of other packages say when they fail."""

import importlib
from types import ModuleType

from common.errors import DataError


def optional_package(module: str, purpose: str, package: str | None = None) -> ModuleType:
    """The module, or a DataError that tells which package to install. package: where pip has another name for it."""
    package = package or module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"the package {package} is needed {purpose}: pip install {package}") from None


def loader_reason(error: Exception) -> str:
    """Why a loader of transformers failed, in part of a line."""
    # Its own words end in the advice to run that code.
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is never run here; use a kind that transformers knows by itself"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
