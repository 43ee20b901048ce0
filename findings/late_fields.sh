#!/usr/bin/env bash
# polars 2.1.0, read_ndjson and scan_ndjson
# One would guess: a field that first appears far down in the file becomes a column, empty above; or the reader stops.
# What happens: the first 100 lines decide which fields there are. Later ones are dropped without a word, also fields inside lists of
# messages. (A number that does not fit the type of the first 100 lines does stop the reader.)
# In a run: sets are often sorted or joined by source. If the conversations with "system", "tool_calls" or a weight come after the 100th
# line, they are trained without.
# Instead: infer_schema_length=None, which reads the file twice, or schema=...
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile polars==2.1.0
env/bin/python - <<'END'
import json

import polars

lines = [{"messages": [{"role": "user", "content": "Hi"}]}] * 100
lines += [{"messages": [{"role": "user", "content": "Hi", "name": "Bob"}], "system": "Be brief."}] * 100
with open("chats.jsonl", "w") as file:
    file.writelines(json.dumps(line) + "\n" for line in lines)

print("polars", polars.__version__)
for frame in (polars.read_ndjson("chats.jsonl"), polars.scan_ndjson("chats.jsonl").collect()):
    print("line 200 in the file", lines[-1])
    print("line 200 as read    ", frame.row(-1, named=True))
    assert frame.row(-1, named=True) == {"messages": [{"role": "user", "content": "Hi"}]}

whole = polars.read_ndjson("chats.jsonl", infer_schema_length=None)
assert whole.row(-1, named=True) == lines[-1]
END
