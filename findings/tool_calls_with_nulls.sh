#!/usr/bin/env bash
# datasets 5.2.0 and pyarrow 26.0.1: tool calls in Parquet
# One would guess: the arguments of a tool call come back as they were written.
# What happens: a column has one type, so each call gets the argument names of all calls in the set, with None where it had none of
# that name; saved as Parquet they stay for every reader. load_dataset("json") of the same rows as a file does keep them apart.
# In a run: a chat template writes the arguments by tojson. The model learns calls with "path": null for a tool that has no path,
# and the longer the list of tools, the more of the trained tokens are such nulls.
# Instead: keep arguments as a string of JSON, or drop None before the template.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1
env/bin/python - <<'END'
import json

import datasets
import pyarrow.parquet

datasets.disable_progress_bars()
arguments = [{"city": "Paris"}, {"path": "a.txt", "mode": "r"}]
rows = [{"messages": [{"role": "assistant", "tool_calls": [{"name": "tool", "arguments": each}]}]} for each in arguments]


def arguments_of(rows):
    return [json.dumps(row["messages"][0]["tool_calls"][0]["arguments"]) for row in rows]


print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
made = datasets.Dataset.from_list(rows)
made.to_parquet("calls.parquet")
read = pyarrow.parquet.read_table("calls.parquet").to_pylist()
print("written      ", *arguments_of(rows))
print("from_list    ", *arguments_of(made))
print("from Parquet ", *arguments_of(read))
nulls = ['{"city": "Paris", "path": null, "mode": null}', '{"city": null, "path": "a.txt", "mode": "r"}']
assert [json.loads(each) for each in arguments_of(made)] == [json.loads(each) for each in nulls]
assert [json.loads(each) for each in arguments_of(read)] == [json.loads(each) for each in nulls]

with open("calls.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
loaded = datasets.load_dataset("json", data_files="calls.jsonl", split="train", cache_dir="cache")
print("load_dataset ", *arguments_of(loaded))
assert arguments_of(loaded) == arguments_of(rows)
END
