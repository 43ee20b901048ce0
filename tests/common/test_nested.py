"""common/nested.py. Reference: what each test writes out."""

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


def test_a_tensor_that_is_there_twice_stays_one():
    asked = []

    def copied(name, value):
        asked.append(name)
        return value.clone()

    tensor = torch.ones(2)
    found = replaced({"weight": tensor, "tied": tensor, "other": torch.ones(2)}, copied)
    assert asked == ["weight", "other"] and found["weight"] is found["tied"] is not tensor
