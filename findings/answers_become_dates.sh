#!/usr/bin/env bash
# pyarrow 26.0.1, pyarrow.json.read_json; datasets 5.2.0, load_dataset("json")
# One would guess: JSON has no dates, so what stands in quotation marks is a string.
# What happens: if all values of a field look like ISO dates, the field is read as timestamps. str() of one has a time that
# nobody wrote, or another separator. One value that is no date makes the whole file strings again.
# In a run: a set of questions on dates trains the answer "2024-02-29 00:00:00" where the file says "2024-02-29"; exact match with the file is then 0.
# Instead: name the types: features=Features({"answer": Value("string"), ...}), explicit_schema=... for pyarrow.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1
env/bin/python - <<'END'
import json

import datasets
import pyarrow
import pyarrow.json

datasets.disable_progress_bars()
answers = ["2024-02-29", "2023-12-31"]


def read(name, answers):
    with open(name, "w") as file:
        file.writelines(json.dumps({"answer": answer}) + "\n" for answer in answers)
    by_datasets = datasets.load_dataset("json", data_files=name, split="train", cache_dir="cache")["answer"]
    by_pyarrow = pyarrow.json.read_json(name)["answer"].to_pylist()
    return [str(answer) for answer in by_datasets], [str(answer) for answer in by_pyarrow]


print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
changed = read("dates.jsonl", answers)
print("written", answers, "read by datasets and by pyarrow", *changed)
assert changed == (["2024-02-29 00:00:00", "2023-12-31 00:00:00"],) * 2

kept = read("mixed.jsonl", [*answers, "in May"])
print("with a third answer, in May:", *kept)
assert kept == ([*answers, "in May"],) * 2

schema = pyarrow.schema([("answer", pyarrow.string())])
options = pyarrow.json.ParseOptions(explicit_schema=schema)
assert pyarrow.json.read_json("dates.jsonl", parse_options=options)["answer"].to_pylist() == answers
END
