#!/usr/bin/env bash
# datasets 5.2.0 with pyarrow 26.0.1, load_dataset("json")
# One would guess: what stands in quotation marks comes back as a string, at the latest if features= says so.
# What happens: Arrow's reader, which datasets calls, makes timestamps of a field whose values all look like dates. features= comes too
# late: it turns the timestamps into strings, with a time that nobody wrote. A single value that is no date keeps the whole file as it is.
# In a run: a set of questions on dates trains the answer "2024-02-29 00:00:00" where the file says "2024-02-29". Exact match with the
# file is 0, and the next version of the file, with one other answer in it, is trained on other texts.
# Instead: json.loads line by line, then Dataset.from_list or from_generator.
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

datasets.disable_progress_bars()


def read(name, answers, **options):
    with open(name, "w") as file:
        file.writelines(json.dumps({"answer": answer}) + "\n" for answer in answers)
    rows = datasets.load_dataset("json", data_files=name, split="train", cache_dir="cache", **options)
    print("written", answers, "read as", [str(answer) for answer in rows["answer"]])
    return [str(answer) for answer in rows["answer"]]


print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
dates = ["2024-02-29", "2023-12-31"]
changed = ["2024-02-29 00:00:00", "2023-12-31 00:00:00"]
assert read("dates.jsonl", dates) == changed
strings = datasets.Features({"answer": datasets.Value("string")})
assert read("typed.jsonl", dates, features=strings) == changed
assert read("mixed.jsonl", [*dates, "in May"]) == [*dates, "in May"]
with open("dates.jsonl") as file:
    assert datasets.Dataset.from_list([json.loads(line) for line in file])["answer"][:] == dates
END
