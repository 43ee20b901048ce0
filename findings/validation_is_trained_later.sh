#!/usr/bin/env bash
# datasets 5.2.0 with pyarrow 26.0.1, take and skip of a shuffled stream
# One would guess: stream.shuffle(seed=0), then take(n) for validation and skip(n) for training, in this order, as the page on streaming
# advises, gives two parts that never meet.
# What happens: the split is made anew in each pass, of the order of that pass. set_epoch, which trainers call before each epoch, changes the order,
# and with it which rows are skipped: from the second epoch on the training reads rows of validation, and others are never seen.
# In a run: the loss on validation data goes on falling after it should rise, and early stopping lets the run go on. In the first epoch, where one
# looks, the parts are disjoint.
# Instead: take and skip first and shuffle the training part behind them, or split files.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1
env/bin/python - <<'END'
import datasets


def stream():
    return datasets.Dataset.from_dict({"row": list(range(1000))}).to_iterable_dataset(num_shards=4)


def rows(part, epoch):
    part.set_epoch(epoch)
    return {row["row"] for row in part}


def trained_of_validation(validation, train):
    """Of the rows that validation has before the first epoch, how many each of three epochs trains."""
    held_out = rows(validation, 0)
    return [len(held_out & rows(train, epoch)) for epoch in range(3)]


print("datasets", datasets.__version__)
shuffled = stream().shuffle(seed=0, buffer_size=100)
leaked = trained_of_validation(shuffled.take(200), shuffled.skip(200))
apart = trained_of_validation(stream().take(200), stream().skip(200).shuffle(seed=0, buffer_size=100))
print("200 rows of validation, trained in epochs 0, 1, 2; shuffled first:", leaked, "split first:", apart)
assert leaked[0] == 0 and min(leaked[1:]) > 20
assert apart == [0, 0, 0]
END
