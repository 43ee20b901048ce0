"""Files that are damaged, missing, of another run, or malicious; and a full disk."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.faults.harness import make_corpus, make_tokenizer
from tests.helpers import swap_entries
from trainer.saving.checkpoint import Checkpoints, recorded_digests, update_of, verified

PAGE = 4096
OTHER_DATA = "another data (--data_path, --text_field, --split_text, --skip_bad_lines, --deduplicate): "
OTHER_TOKENIZER = "another tokenizer (--tokenizer_path): "
CHANGES = {
    "no weights": ("pth", Path.unlink),
    "no record": ("json", Path.unlink),
    "cut weights": ("pth", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    "another config": ("json", lambda p: p.write_text(p.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))),
}


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    """A copy of the undisturbed run's checkpoint folder: two checkpoints."""
    copy = tmp_path_factory.mktemp("damage") / "resume"
    shutil.copytree(f"{whole.stem('whole')}_resume", copy)
    return copy


def notices_and_falls_back(folder, damaged, capsys):
    """True if damage to the newest checkpoint is reported, and the one before is taken."""
    newest, before = Checkpoints(folder).paths()
    original = newest.read_bytes()
    try:
        newest.write_bytes(damaged)
        found = Checkpoints(folder).newest()
        (said,) = capsys.readouterr().out.splitlines()
        return found == before and str(newest) in said
    finally:
        newest.write_bytes(original)


def test_damage_is_noticed(folder, capsys):
    good = Checkpoints(folder).paths()[0].read_bytes()
    n = len(good)
    flipped = bytearray(good)
    flipped[n // 3] ^= 4
    full = next(at for at in range(0, n, PAGE) if any(good[at : at + PAGE]))
    zeroed = good[:full] + bytes(PAGE) + good[full + PAGE :]
    for damaged in (b"", good[: n // 2], good[:-1], flipped, zeroed):
        assert notices_and_falls_back(folder, damaged, capsys)
    assert Checkpoints(folder).newest() == Checkpoints(folder).paths()[0]


def test_without_its_digest_never_chosen(folder, capsys):
    newest, before = Checkpoints(folder).paths()
    path = Path(f"{newest}.sha256")
    original = path.read_bytes()
    for digest in (None, b"\xff\xfe", b"0" * 64):
        path.unlink()
        if digest is not None:
            path.write_bytes(digest)
        found = Checkpoints(folder).newest()
        # which ranks compare before that
        digests = recorded_digests(newest)
        path.write_bytes(original)
        assert found == before and str(newest) in capsys.readouterr().out
        assert digests != recorded_digests(newest)


def test_truncated_checkpoints_alone_are_exit_code_2(lab, whole):
    shutil.copytree(whole.folder / "whole", lab.folder / "run")
    for path in lab.checkpoints("run"):
        path.write_bytes(path.read_bytes()[:1000])
    process = lab.run("run", expect=2, from_resume=1)
    assert process.err.count("\n") == 1 and "none of its 2 checkpoints is intact" in process.err
    assert all(str(path) in process.out for path in lab.checkpoints("run"))


def test_newest_bad_goes_on_from_the_one_before(lab, whole):
    """And ends where the undisturbed run ends; the damaged file does not count as one of those that are kept."""
    lab.start("run", {"signal_at": {"updates": [8]}}).wait()
    newest, before = lab.checkpoints("run")
    newest.write_bytes(newest.read_bytes()[:-1])
    process = lab.start("run", {"signal_at": {"updates": [7]}}, from_resume=1)
    assert process.wait() == 143
    assert f"{newest}: damaged" in process.out and f"resumed from {before}" in process.out
    assert lab.checkpoints("run")[1] == before and all(map(verified, lab.checkpoints("run")))
    lab.finish(whole)


@pytest.mark.parametrize(("at_tries", "left"), [([2, 3], [8, 3]), ([3], [8, 6])], ids=["no room", "room for two"])
def test_disk_full_in_the_middle_of_a_save(lab, whole, at_tries, left):
    """If a second try fails too, the file is named, and training goes on. What was saved is intact, and the run ends as it would have."""
    hooks = {"full_disk": {"at_tries": at_tries, "offset": 50_000}, "slow_updates": {"seconds": 0.02}}
    hooks["signal_at"] = {"updates": [8]}
    process = lab.start("run", hooks)
    assert process.wait() == 143
    assert ("update_00000006.pt: No space left" in process.out) == (left == [8, 3])
    assert [update_of(path) for path in lab.checkpoints("run")] == left
    assert all(map(verified, lab.checkpoints("run"))) and lab.leftovers("run") == []
    lab.finish(whole)


@pytest.mark.parametrize(("at_tries", "code"), [([7, 8], 0), (list(range(2, 20)), 2)], ids=["room is made", "no room"])
def test_disk_full_at_the_weights(lab, whole, at_tries, code):
    """At the end older checkpoints make room for them. If that does not suffice, the resume of the finished run writes them."""
    hooks = {"full_disk": {"at_tries": at_tries, "offset": 1000, "ending": ".pth"}}
    process = lab.run("run", expect=code, hooks=hooks)
    assert [update_of(path) for path in lab.checkpoints("run")] == [20]
    if code:
        assert "pretrain_32.pth: No space left" in process.err and lab.leftovers("run") == []
        lab.run("run", from_resume=1)
    assert lab.result("run") == whole.result("whole")


@pytest.mark.parametrize("change", CHANGES)
def test_the_resume_of_a_finished_run_writes_what_is_not_there(lab, whole, change):
    """The record names the file that is there, as `sha256sum` sees it, and is otherwise as before."""
    shutil.copytree(whole.folder / "whole", lab.folder / "run")
    paths = [lab.stem("run").with_suffix(suffix) for suffix in (".pth", ".json")]
    before = json.loads(paths[1].read_bytes())
    ending, apply = CHANGES[change]
    apply(lab.stem("run").with_suffix(f".{ending}"))
    lab.run("run", from_resume=1)
    after = json.loads(paths[1].read_bytes())
    recorded = {one.pop("weights_sha256")[0] for one in (before, after)}
    assert recorded == {hashlib.sha256(paths[0].read_bytes()).hexdigest()} and before == after


def test_a_checkpoint_that_cannot_be_read_again_is_skipped(lab, whole):
    lab.start("run", {"signal_at": {"updates": [8]}}).wait()
    newest, before = lab.checkpoints("run")
    process = lab.run("run", hooks={"fail_first_load": {"message": "read failed"}}, from_resume=1)
    assert f"{newest}: cannot be read (read failed); skipped\nresumed from {before}" in process.out
    assert lab.result("run") == whole.result("whole")


def test_disk_full_for_everything(lab):
    """Metrics and log lines do not fit either: still one line, not a traceback."""
    process = lab.run("run", expect=2, hooks={"limit": {"name": "RLIMIT_FSIZE", "value": 3000}})
    assert process.err.count("\n") == 1 and "pretrain_32_resume" in process.err
    assert lab.leftovers("run") == [] and lab.checkpoints("run") == []


def test_no_threads_left(lab):
    """Found before there is anything to lose."""
    process = lab.run("run", expect=2, hooks={"no_threads": {}})
    assert process.err.startswith("error: no more threads can be started: ") and process.err.count("\n") == 1
    assert lab.log_lines("run") == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_path": lambda folder: make_corpus(folder / "other.jsonl", seed=1)}, OTHER_DATA),
        ({"tokenizer_path": lambda folder: swap_entries(make_tokenizer(folder / "new"))}, OTHER_TOKENIZER),
        ({"max_seq_len": 16}, "max_seq_len"),
        ({"num_attention_heads": 8}, "another architecture num_attention_heads"),
    ],
    # The same in each process of pytest-xdist
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_a_resume_cannot_go_on_with_is_named(lab, whole, changes, said):
    shutil.copytree(whole.folder / "whole", lab.folder / "run")
    changes = {flag: value(lab.folder) if callable(value) else value for flag, value in changes.items()}
    process = lab.run("run", expect=2, from_resume=1, **changes)
    assert process.err.count("\n") == 1 and said in process.err


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def malicious(path, as_zip):
    """The bytes of a torch file, of the zip or the old format, with a payload in it that does run where it may."""
    buffer = io.BytesIO()
    torch.save({"model": torch.zeros(3), "payload": Payload(path)}, buffer, _use_new_zipfile_serialization=as_zip)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)["payload"].close()
    path.unlink()
    return buffer.getvalue()


def test_pickle_in_a_weight_file(lab, whole):
    ran, weights = lab.folder / "ran", lab.folder / "bad.pth"
    weights.write_bytes(malicious(ran, as_zip=True))
    weights.with_suffix(".json").write_bytes(whole.stem("whole").with_suffix(".json").read_bytes())
    assert lab.run("run", expect=2, from_weight=weights).err.count("\n") == 1 and not ran.exists()


def test_pickle_in_a_resume_file(lab, whole):
    """With a digest that somebody has forged: torch refuses to read it."""
    shutil.copytree(whole.folder / "whole", lab.folder / "run")
    ran, path = lab.folder / "ran", lab.checkpoints("run")[0]
    path.write_bytes(malicious(ran, as_zip=False))
    Path(f"{path}.sha256").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    process = lab.run("run", expect=1, from_resume=1)
    assert not ran.exists() and "Weights only load failed" in process.err
