"""What --sample_prompts names. Reference: the strings and lines as they were written."""

import pytest

from common.errors import UserError
from trainer.sampling import read_prompts


def test_prompts_are_strings_or_the_lines_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The cat\n\n猫\n", encoding="utf-8")
    assert read_prompts([str(file)]) == ["The cat", "猫"]
    assert read_prompts(["The cat", str(file)]) == ["The cat", str(file)]
    assert read_prompts(["x" * 5000]) == ["x" * 5000]


def test_what_cannot_be_read_is_named(tmp_path):
    """Of several prompts the one that is not UTF-8; of a file its path, and the system's reason."""
    with pytest.raises(UserError, match=r"^--sample_prompts: 'caf\\udce9' is not UTF-8$"):
        read_prompts(["The cat", "caf\udce9"])
    with pytest.raises(UserError, match=r"missing\.txt: no UTF-8 text can be read from there \(No such file"):
        read_prompts([str(tmp_path / "missing.txt")])
