#!/usr/bin/env bash
# pandas 3.1.1, read_json(lines=True)
# One would guess: strings of a JSON file are strings of the frame; JSON says which values are numbers.
# What happens: if all strings of a column are numbers, the column becomes numbers: "007" is 7.0, "1.50" is 1.5, and 17 digits are rounded.
# One answer that is no number leaves all of them as they are.
# In a run: sums and zip codes are trained with other digits than the file has, and the tokenizer cuts "7.0" otherwise than "007".
# The same file in pieces gives other texts than in one.
# Instead: read_json(..., dtype=False), or json.loads line by line.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile pandas==3.1.1
env/bin/python - <<'END'
import io
import json

import pandas


def read(answers, **options):
    text = "".join(json.dumps({"question": "?", "answer": answer}) + "\n" for answer in answers)
    return [str(answer) for answer in pandas.read_json(io.StringIO(text), lines=True, **options)["answer"]]


answers = ["007", "1.50", "12345678901234567"]
print("pandas", pandas.__version__)
changed = read(answers)
print("written", answers, "read", changed)
assert changed == ["7.0", "1.5", "1.2345678901234568e+16"]
print("only the first:", read(answers[:1]), "with a word among them:", read([*answers, "none"]))
assert read(answers[:1]) == ["7"]
assert read([*answers, "none"]) == [*answers, "none"]
assert read(answers, dtype=False) == answers
END
