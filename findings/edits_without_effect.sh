#!/usr/bin/env bash
# datasets 5.2.0, Dataset.map and filter with a function of another module
# One would guess: results are cached under a hash of the function, so once its code is edited the next run computes again.
# What happens: the hash covers the code of functions in the script itself. Of an imported one only module and name are hashed, also where a
# lambda of the script calls it. After an edit the cache hands out what the old code made, in silence.
# In a run: cleaning or chat formatting is corrected in preprocess.py, and the corrected run trains on the uncorrected text. Moving the function
# into the script, to look at it, makes the fault go away.
# Instead: load_from_cache_file=False while code changes, or new_fingerprint= with a version of the code.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1
cat > run.py <<'END'
import datasets
import preprocess

datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
results = (
    rows.map(preprocess.clean)["text"][0],
    rows.map(lambda row: preprocess.clean(row))["text"][0],
    rows.filter(preprocess.is_kept).num_rows,
    rows.map(preprocess.clean, load_from_cache_file=False)["text"][0],
)
print("map, map of a lambda, rows that filter keeps, map without cache:", *results, sep=" | ")
END
cat > edit.py <<'END'
import pathlib
import subprocess
import sys

import datasets

pathlib.Path("rows.jsonl").write_text('{"text": "Hello World"}\n')
outputs = []
for method, kept in (("lower", True), ("upper", False)):
    code = f'def clean(row):\n    return {{"text": row["text"].{method}()}}\n\n\ndef is_kept(row):\n    return {kept}\n'
    pathlib.Path("preprocess.py").write_text(code)
    run = subprocess.run([sys.executable, "-B", "run.py"], capture_output=True, text=True, check=True)
    outputs.append(run.stdout.strip().split(" | ")[1:])
    print("datasets", datasets.__version__, f"text.{method}(), kept {kept}:", run.stdout.strip())
assert outputs == [["hello world", "hello world", "1", "hello world"], ["hello world", "hello world", "1", "HELLO WORLD"]]
END
env/bin/python edit.py
