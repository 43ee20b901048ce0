"""common/nested.py. Reference: what each test writes out."""

import pytest
import torch

from common.nested import replaced


def test_names_and_places():
    nest = {"a": [1, {"b": 2}], 3: ((4,), []), "": 5}
    names = {}

    def change(name, value):
        names[value] = name
        return -value

    assert replaced(nest, change) == {"a": [-1, {"b": -2}], 3: ((-4,), []), "": -5}
    assert names == {1: "a.0", 2: "a.1.b", 4: "3.0.0", 5: ""}
    assert nest["a"] == [1, {"b": 2}]


def test_what_is_no_nest_is_the_value():
    assert replaced(7, lambda name, value: (name, value)) == ("", 7)


def test_a_tensor_that_is_there_twice_stays_one():
    asked = []

    def copied(name, value):
        asked.append(name)
        return value.clone()

    tensor = torch.ones(2)
    found = replaced({"weight": tensor, "tied": tensor, "other": torch.ones(2)}, copied)
    assert asked == ["weight", "other"] and found["weight"] is found["tied"] is not tensor


def test_a_nest_without_end_is_an_error():
    nest = []
    nest.append(nest)
    with pytest.raises(RecursionError):
        replaced(nest, lambda name, value: value)
