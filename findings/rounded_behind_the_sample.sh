#!/usr/bin/env bash
# duckdb 2.0.1, read_json (and FROM 'rows.jsonl')
# One would guess: a type is guessed from the first rows; a later row that does not fit stops the reader, or widens the type.
# What happens: text or a new field in such a row does stop it, with advice. A fraction does not: it is rounded to an integer, halves to even.
# 0.4 and 3 in a column of true and false become true.
# In a run: scores, weights or rewards that are whole in the first 20,480 rows (JavaScript writes 1.0 as 1) lose their fractions behind them:
# 2.5 becomes 2, 3.5 becomes 4 and 0.4 becomes 0, so a filter on the score keeps other rows.
# Instead: sample_size=-1, or columns={...} with the types.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile duckdb==2.0.1
env/bin/python - <<'END'
import json

import duckdb


def write(values):
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps({"score": value}) + "\n" for value in values)


def read(options=""):
    return [row[0] for row in duckdb.sql(f"SELECT score FROM read_json('rows.jsonl'{options})").fetchall()]


late = [0.4, 2.5, 3.5, 2.51]
print("duckdb", duckdb.__version__)
write([1, 2, 3, 4] * 10_000 + late)
print("written", late, "read as", read()[-4:], "and of the whole file", read(", sample_size=-1")[-4:])
assert read()[-4:] == [0, 2, 4, 3]
assert read(", sample_size=-1")[-4:] == late
write(late + [1, 2, 3, 4] * 10_000)
assert read()[:4] == late
write([True] * 40_000 + [0.4, 3])
print("written [0.4, 3] behind true, read as", read()[-2:])
assert read()[-1] is True
write([1] * 40_000 + ["none"])
try:
    read()
except duckdb.InvalidInputException as error:
    print("text behind numbers raises:", str(error)[:90])
else:
    raise AssertionError("text behind numbers is read")
END
