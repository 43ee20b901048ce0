#!/usr/bin/env bash
# datasets 5.2.0, Dataset.from_list and from_generator; pyarrow 26.0.1, Table.from_pylist
# One would guess: rows with different keys become a table with the keys of all of them, empty where a row has none.
# What happens: only the keys of the first row are kept. Those that come later are dropped with their values, without a word.
# In a run: if the first conversation has no "system" or "tools" field, no conversation of the set has one, and the model never sees a system prompt.
# Instead: give the columns (features=..., schema=...), or give every row all keys; read_json of the same rows as a file keeps them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1
env/bin/python - <<'END'
import json
import logging

import datasets
import pyarrow
import pyarrow.json

logging.getLogger("datasets").setLevel(logging.ERROR)
datasets.disable_progress_bars()
rows = [{"prompt": "Hi"}, {"prompt": "Who are you?", "system": "You are a pirate."}]
made = {
    "Dataset.from_list": datasets.Dataset.from_list(rows).to_list(),
    "Dataset.from_generator": datasets.Dataset.from_generator(lambda: iter(rows), cache_dir="cache").to_list(),
    "Table.from_pylist": pyarrow.Table.from_pylist(rows).to_pylist(),
}
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
for name, table in made.items():
    print(name, table)
    assert table == [{"prompt": "Hi"}, {"prompt": "Who are you?"}]

with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
table = pyarrow.json.read_json("rows.jsonl").to_pylist()
print("the same rows as a file", table)
assert table[1]["system"] == "You are a pirate."
END
