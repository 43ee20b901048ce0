"""What --sample_prompts names. Reference: the strings and lines as they were written."""

from trainer.sample_prompts import read_prompts


def test_prompts_are_strings_or_the_lines_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The cat\n\n猫\n", encoding="utf-8")
    assert read_prompts([str(file)]) == ["The cat", "猫"]
    assert read_prompts(["The cat", str(file)]) == ["The cat", str(file)]
    assert read_prompts(["x" * 5000]) == ["x" * 5000]
