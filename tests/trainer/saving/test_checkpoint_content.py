"""Checkpoints with a digest that holds and a wrong content: each is named, changes nothing, and the one before is taken."""

import copy
import hashlib
import io
import json
import math
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from common.errors import BadContentError, UserError
from model.config import YARN_FIELDS
from tests.helpers import flags, train, write_corpus
from trainer import train_pretrain
from trainer.saving.checkpoint import load_checkpoint
from trainer.saving.checkpoint_content import check_fit
from trainer.saving.resume import resume

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in the middle of its second epoch, with its two newest checkpoints on disk."""
    folder = tmp_path_factory.mktemp("content")
    data = write_corpus(folder / "corpus.jsonl", 40)
    run = train(data_path=data, out_dir=folder, epochs=2, save_interval=3, use_moe=1, optimizer="muon")
    assert len(run.checkpoints.paths()) == 2
    return run


def write(path, state):
    torch.save(state, path)
    sign(path)


def sign(path):
    Path(f"{path}.sha256").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


@pytest.fixture
def newest(run):
    """(path of the newest checkpoint, its state); the file is put back afterwards."""
    path = run.checkpoints.paths()[0]
    content = path.read_bytes()
    yield path, load_checkpoint(path)
    path.write_bytes(content)
    sign(path)


def weights_of(run):
    return {name: tensor.clone() for name, tensor in run.engine.model.state_dict().items()}


def falls_back(run, path):
    """Whether a resume names `path` in one line and goes on from the whole of the checkpoint before it."""
    said = []
    run.reporter.say = said.append
    before = run.checkpoints.paths()[1]
    try:
        assert resume(run)
    finally:
        del run.reporter.say
    state = load_checkpoint(before)
    for name, tensor in weights_of(run).items():
        assert torch.equal(tensor, state["model"][name])
    assert run.progress.update == state["progress"]["update"]
    assert str(path) in said[0] and "\n" not in said[0] and len(said[0]) < 400
    return f"resumed from {before}" in said[-1]


def put(state, keys, value):
    """state[keys[0]][keys[1]]... = value, or without that entry where the value is `put` itself."""
    *above, last = keys
    for key in above:
        state = state[key]
    if value is put:
        del state[last]
    else:
        state[last] = value


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value, value]
    return value


def test_what_an_earlier_version_did_not_note_is_not_compared(run, newest, monkeypatch):
    """Its checkpoints say nothing of YaRN. Of what they say all is compared."""
    path, state = newest
    architecture = state["identity"]["architecture"]
    for name in YARN_FIELDS:
        del architecture[name]
    write(path, state)
    said = []
    monkeypatch.setattr(run.reporter, "say", said.append)
    assert resume(run)
    assert said[-1].startswith(f"resumed from {path}")
    architecture["rope_theta"] = 7.0
    write(path, state)
    with pytest.raises(UserError, match="another architecture: rope_theta 7.0 there"):
        resume(run)


ADAMW, MUON = ("engine", "optimizer", "optimizers", 0), ("engine", "optimizer", "optimizers", 1)
WRONG = {
    "no format": (("format",), put),
    "format of a tensor": (("format",), torch.ones(2)),
    "no model": (("model",), put),
    "model is a list": (("model",), [1]),
    "weight missing": (("model", NORM), put),
    "weight unknown": (("model", "surprise"), torch.ones(1)),
    "weight of another shape": (("model", NORM), torch.ones(3)),
    "weight of another type": (("model", NORM), torch.ones(16, dtype=torch.float64)),
    "weight is text": (("model", NORM), "text"),
    "weight is sparse": (("model", NORM), torch.ones(16).to_sparse()),
    "weight is NaN": (("model", NORM), torch.full((16,), math.nan)),
    "weight is infinite": (("model", NORM), torch.full((16,), math.inf)),
    "weight of one number": (("model", NORM), torch.ones(1).expand(16)),
    "no optimiser": (("engine", "optimizer"), put),
    "one optimiser too few": (("engine", "optimizer", "optimizers"), []),
    "group with other parameters": ((*ADAMW, "param_groups", 0, "params"), [7]),
    "no state of a parameter": ((*ADAMW, "state", 0), put),
    "no state at all": ((*MUON, "state"), {}),
    "optimiser with more": ((*ADAMW, "surprise"), torch.ones(1)),
    "optimisers with more": (("engine", "optimizer", "surprise"), torch.ones(1)),
    "moment missing": ((*ADAMW, "state", 0, "exp_avg"), put),
    "moment of another shape": ((*ADAMW, "state", 0, "exp_avg_sq"), torch.ones(2)),
    "momentum is NaN": ((*MUON, "state", 0, "momentum_buffer", 0), math.nan),
    "count is NaN": ((*ADAMW, "state", 0, "step"), torch.tensor(math.nan)),
    "count is negative": ((*ADAMW, "state", 0, "step"), torch.tensor(-1.0)),
    "skipped is NaN": (("engine", "skipped"), [math.nan, 0.0]),
    "skipped is one number": (("engine", "skipped"), [0.0]),
    "scaler is NaN": (("engine", "scaler"), {"scale": math.nan}),
    "row of 10^9": (("progress", "row"), 10**9),
    "row is negative": (("progress", "row"), -1),
    "row is a fraction": (("progress", "row"), 1.5),
    "row beyond all integers": (("progress", "row"), 10**400),
    "epoch is -1": (("progress", "epoch"), -1),
    "epoch of 10^9": (("progress", "epoch"), 10**9),
    "epoch is NaN": (("progress", "epoch"), math.nan),
    "update of another file": (("progress", "update"), 3),
    "step before the update": (("progress", "step"), 0),
    "tokens is a tensor": (("progress", "tokens"), torch.ones(1)),
    "best loss is NaN": (("progress", "best_val_loss"), math.nan),
    "unknown progress": (("progress", "surprise"), 1),
    "moves of a run without": (("progress", "moves"), [{"row": 0, "fall_row": 9, "fall_progress": 1.0, "end": 9}]),
    "moves is a number": (("progress", "moves"), 3),
    "progress is a list": (("progress",), [1]),
    "no ranks": (("ranks",), []),
    "rank is text": (("ranks", 0), "text"),
    "sums are too few": (("ranks", 0, "sums"), [0.0]),
    "sums are NaN": (("ranks", 0, "sums", 0), math.nan),
    "no random state": (("ranks", 0, "rng"), {}),
    "random state too short": (("ranks", 0, "rng", "torch"), torch.zeros(7, dtype=torch.uint8)),
    "random state of floats": (("ranks", 0, "rng", "torch"), torch.zeros(5056)),
    "random state of Python": (("ranks", 0, "rng", "python"), (3, (1, 2, 3), None)),
    "random state of NumPy beyond its table": (("ranks", 0, "rng", "numpy", 2), 10**6),
    "random state of NumPy too short": (("ranks", 0, "rng", "numpy", 1), torch.zeros(3, dtype=torch.int64)),
    "no settings": (("settings",), put),
    "batch size is text": (("settings", "batch_size"), "many"),
    "setting is a tensor": (("settings", "grad_clip"), torch.ones(2)),
    "settings without end": (("settings", "grad_clip"), nest(60)),
    "identity missing": (("identity", "data"), put),
    "identity is a tensor": (("identity",), torch.ones(3)),
    "seconds is NaN": (("seconds",), math.nan),
    "no tracker": (("tracker_ids",), put),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_content_is_named_and_the_one_before_is_taken(run, newest, name):
    path, state = newest
    keys, value = WRONG[name]
    state = copy.deepcopy(state)
    put(state, keys, value)
    write(path, state)
    assert falls_back(run, path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weight is NaN", "NaN or infinite"),
        ("weight of one number", "claims more numbers than it has"),
        ("weight of another type", "torch.float64, not torch.float32"),
        ("momentum is NaN", "momentum_buffer of parameter 0 has numbers that are NaN"),
        ("row of 10^9", "row is 1000000000, and the epoch has"),
        ("random state of NumPy beyond its table", "the random state of numpy is none"),
    ],
)
def test_the_line_says_what_is_wrong(run, newest, name, words):
    path, state = newest
    state = copy.deepcopy(state)
    put(state, *WRONG[name])
    write(path, state)
    said = []
    run.reporter.say = said.append
    resume(run)
    del run.reporter.say
    assert words in said[0]


@pytest.mark.parametrize("content", [b"some text\n", b"", b"PK\x03\x04" + bytes(50), bytes(range(256))])
def test_a_signed_file_of_another_kind_is_passed_over(run, newest, content):
    path, _ = newest
    path.write_bytes(content)
    sign(path)
    assert falls_back(run, path)


def test_a_compressed_archive_is_passed_over(run, newest):
    """torch writes none, and what a small one unpacks to has no bound."""
    path, _ = newest
    whole = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    sign(path)
    assert falls_back(run, path)


@pytest.mark.parametrize("state", [[1, 2], "text", torch.ones(3), {}, OrderedDict(), {"model": {}}, {1: 2}])
def test_a_signed_value_of_another_kind_is_passed_over(run, newest, state):
    path, _ = newest
    write(path, state)
    assert falls_back(run, path)


def test_the_whole_content_is_taken_over(run, newest):
    """What is not touched is not refused either."""
    path, state = newest
    write(path, state)
    assert resume(run)
    assert run.progress.update == state["progress"]["update"]
    for name, tensor in weights_of(run).items():
        assert torch.equal(tensor, state["model"][name])


def test_all_of_them_wrong_is_one_line_and_exit_code_2(tmp_path, capsys):
    data = write_corpus(tmp_path / "corpus.jsonl", 20)
    run = train(data_path=data, out_dir=tmp_path, epochs=2, save_interval=2)
    paths = run.checkpoints.paths()
    for path in paths:
        state = load_checkpoint(path)
        state["progress"]["row"] = 10**9
        write(path, state)
    capsys.readouterr()
    with pytest.raises(UserError, match=f"none of its {len(paths)} checkpoints is intact") as error:
        train_pretrain.main(flags(data_path=data, out_dir=tmp_path, epochs=3, from_resume=1))
    assert "\n" not in str(error.value)
    said = capsys.readouterr().out
    assert all(str(path) in said for path in paths)


# ------------------------------------------------------------------------------------------------- at random

ZOO = [
    None, True, 0, 1, -1, 10**9, 2**63, 10**400, 0.5, -0.5, math.nan, math.inf, -math.inf, "", "text", b"bytes", [], {},
    (), [1], {"a": 1}, {1: 2}, torch.ones(()), torch.ones(2), torch.zeros(0), torch.ones(2, 2, dtype=torch.complex64),
    torch.ones(16, dtype=torch.int32), torch.ones(2).to_sparse(), torch.ones(1).expand(10_000, 10_000),
    torch.zeros(5056, dtype=torch.uint8), torch.full((16,), math.nan), torch.ones(4, device="meta"), put,
]  # fmt: skip


def random_place(state, generator):
    """The keys that lead to an entry somewhere in the nest."""
    keys = []
    while isinstance(state, (dict, list)) and state:
        choices = list(state) if isinstance(state, dict) else list(range(len(state)))
        key = generator.choice(choices)
        keys.append(key)
        state = state[key]
        if generator.random() < 0.15:
            break
    return keys


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_300_random_changes_end_in_a_whole_state(run, newest):
    """Whatever stands where: the changed checkpoint is taken whole, the one before is, or the run ends in one line."""
    path, state = newest
    generator = random.Random(0)
    counts = {"passed over": 0, "taken": 0, "ended": 0}
    for _ in range(300):
        changed = copy.deepcopy(state)
        keys = random_place(changed, generator)
        put(changed, keys, generator.choice(ZOO))
        write(path, changed)
        said = []
        run.reporter.say = said.append
        try:
            assert resume(run), keys
        except UserError as error:
            assert "\n" not in str(error), keys
            counts["ended"] += 1
            continue
        finally:
            del run.reporter.say
        taken = load_checkpoint(path if f"resumed from {path}" in said[-1] else run.checkpoints.paths()[1])
        counts["taken" if taken["progress"]["update"] == state["progress"]["update"] else "passed over"] += 1
        assert run.progress.update == taken["progress"]["update"], keys
        for name, tensor in weights_of(run).items():
            assert torch.equal(tensor, taken["model"][name]), keys
            assert tensor.isfinite().all(), keys
    print(counts)
    assert counts["passed over"] > 150


MOVE = {"row": 0, "fall_row": 90, "fall_progress": 1.0, "end": 90}
BAD_MOVES = {
    "none": [],
    "a number": 1,
    "no dict": [MOVE, [1, 2, 3, 4]],
    "another field": [{**MOVE, "why": 1}],
    "a field too few": [{"row": 0, "end": 90}],
    "a negative row": [MOVE, {**MOVE, "row": -1}],
    "a fraction": [MOVE, {**MOVE, "row": 1.5}],
    "falls before its row": [MOVE, {**MOVE, "row": 8, "fall_row": 4}],
    "ends before it falls": [MOVE, {**MOVE, "end": 80}],
    "out of order": [MOVE, {**MOVE, "row": 8}, {**MOVE, "row": 4}],
    "not from the start": [{**MOVE, "row": 4}],
    "after the row that comes next": [MOVE, {**MOVE, "row": 80}],
    "NaN": [MOVE, {**MOVE, "fall_progress": math.nan}],
    "fills the memory": [{**MOVE, "fall_row": 10**15, "end": 10**15}, MOVE],
    "ends before the row that comes next": [{**MOVE, "fall_row": 9, "end": 9}],
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A run of 16 updates whose shares change, with its two newest checkpoints on disk."""
    folder = tmp_path_factory.mktemp("planned")
    sources = []
    for seed in range(2):
        sources.append(str(write_corpus(folder / f"{seed}.jsonl", 60, seed)))
    mixture = folder / "mix.json"
    entries = []
    for path, share in zip(sources, ([[0, 1], [1, 0]], [[0, 0], [1, 1]]), strict=True):
        entries.append({"path": path, "share": share, "repeat": 9})
    mixture.write_text(json.dumps({"sources": entries}))
    run = train(mixture=mixture, out_dir=folder, max_updates=16, save_interval=10)
    assert [path.name[-6:-3] for path in run.checkpoints.paths()] == ["016", "015"]
    run.checkpoints.paths()[0].unlink()
    return run


@pytest.mark.parametrize("moves", BAD_MOVES.values(), ids=BAD_MOVES)
def test_moves_that_cannot_be_are_found(planned, moves):
    """Row 60 comes next. Reference: the checkpoint with its own moves, which is taken."""
    (path,) = planned.checkpoints.paths()
    state = load_checkpoint(path)
    check_fit(state, planned, 15)
    state["progress"]["moves"] = moves
    with pytest.raises(BadContentError, match="progress"):
        check_fit(state, planned, 15)
