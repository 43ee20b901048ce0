#!/usr/bin/env bash
# orjson 3.13.0, pyarrow 26.0.1 and duckdb 2.0.1: JSON with long integers
# One would guess: an integer of a JSON file comes back digit by digit, as with Python's json, or the reader raises.
# What happens: beyond 64 bits all three give a float of 16 right digits. pyarrow does so from 2^63 on, where the other two are still exact.
# In a run: sets of arithmetic ("a": 3141592653589793238462, "b": ...) are trained on sums and products that are wrong in all digits but the first 16,
# and so is what checks the answers, if it reads the same way.
# Instead: json of the standard library, or write long numbers as strings.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile orjson==3.13.0 pyarrow==26.0.1 duckdb==2.0.1
env/bin/python - <<'END'
import json

import duckdb
import orjson
import pyarrow
import pyarrow.json


def read(number):
    """The number, read from a line of JSON by json, orjson, pyarrow and duckdb."""
    line = f'{{"sum": {number}}}\n'
    with open("rows.jsonl", "w") as file:
        file.write(line)
    by_json = json.loads(line)["sum"]
    assert by_json == number
    by_pyarrow = pyarrow.json.read_json("rows.jsonl").to_pylist()[0]["sum"]
    by_duckdb = duckdb.sql("SELECT sum FROM read_json('rows.jsonl')").fetchall()[0][0]
    results = (orjson.loads(line)["sum"], by_pyarrow, by_duckdb)
    print(number, "by orjson, pyarrow, duckdb:", *results)
    return results


print("orjson", orjson.__version__, "pyarrow", pyarrow.__version__, "duckdb", duckdb.__version__)
short, longer, long = 2**63 - 1, 2**64 - 1, 3141592653589793238462
assert read(short) == (short, short, short)
assert read(longer) == (longer, float(longer), longer)
assert [type(result) for result in read(longer)] == [int, float, int]
assert read(long) == (float(long),) * 3 and float(long) != long
END
