"""Nests of dicts, lists and tuples, such as the state of a run."""

from collections.abc import Callable
from typing import Any


def replaced(nest: Any, change: Callable[[str, Any], Any]) -> Any:
    """The nest with change(name, value) in the place of each value. name: keys and numbers with dots between.

    A value that is in it twice is asked for once, by its first name, so that tied tensors stay one.
    Errors: RecursionError for one that is nested too deep.
    """
    # {id of a value: what takes its place}
    known: dict[int, Any] = {}

    def of(value: Any, name: str) -> Any:
        start = f"{name}." if name else ""
        if isinstance(value, dict):
            return {key: of(item, f"{start}{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(of(item, f"{start}{number}") for number, item in enumerate(value))
        if id(value) not in known:
            known[id(value)] = change(name, value)
        return known[id(value)]

    return of(nest, "")
