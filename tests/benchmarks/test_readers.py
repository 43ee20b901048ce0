"""benchmarks/readers.py. References: workers made up here, whose answers are right or wrong in a known way; real programs."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks import readers
from benchmarks.readers import Answer, Questions, Reader, ask_and_compare
from common.errors import UserError
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import ROOT, write_corpus

IDS = [[1, 5, 6], [1, 7]]
LOGITS = [np.array([[0.5, -2.0], [1.0, 0.0]], dtype=np.float32)]
REFERENCE = Answer("ours", IDS, LOGITS, ["the cat"])
QUESTIONS = Questions(["a", "b"], [[1, 5]])
# Answers what it was told to answer, as the real ones do.
WORKER = """
import json, sys, numpy
request = json.load(sys.stdin)
numpy.savez(request["logits"], *[numpy.array(values, dtype=numpy.float32) for values in request["values"]])
print("a line of some library")
json.dump({"version": "9", "ids": request["ids"], "greedy": request["greedy"]}, sys.stdout)
"""
RIGHT = {"ids": IDS, "values": [LOGITS[0].tolist()], "greedy": ["the cat"]}


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """A function: (changes of a right answer, worker) -> what the table says of it."""
    monkeypatch.setattr(readers, "WORKERS", tmp_path)

    def cells(changes=None, worker=WORKER, **fields):
        (tmp_path / "worker.py").write_text(worker)
        reader = Reader("theirs", "worker.py", {**RIGHT, **(changes or {})}, **fields)
        return ask_and_compare(reader, REFERENCE, QUESTIONS, tmp_path)

    return cells


def test_equal_answers_are_said_to_be_equal(answered):
    assert answered() == ("9", "2 of 2", "0.0e+00", "yes")
    # A vocabulary that is filled up to a round number is no difference.
    assert answered({"values": [[[0.5, -2.0, 0.0], [1.0, 0.0, 0.0]]]}) == ("9", "2 of 2", "0.0e+00", "yes")


@pytest.mark.parametrize(
    "changes, column, said",
    [
        ({"ids": [[1, 5, 6], [7]]}, 1, "1 of 2 **NO**"),
        # The largest logit is 2: relative to it a change of 1e-3 is one of 5e-4.
        ({"values": [[[0.5, -2.0], [1.0, 1e-3]]]}, 2, "5.0e-04 **NO**"),
        ({"values": [[[0.5, -2.0], [1.0, float("nan")]]]}, 2, "nan **NO**"),
        ({"values": [[[0.5], [1.0]]]}, 2, "inf **NO**"),
        ({"values": [[[0.5, -2.0]]]}, 2, "inf **NO**"),
        ({"greedy": ["the dog"]}, 3, "**NO**"),
    ],
)
def test_an_answer_that_differs_is_marked(answered, changes, column, said):
    cells = answered(changes)
    assert cells[column] == said
    assert [cell for cell in cells if "NO" in cell] == [said]


def test_llama_cpp_may_round_more(answered):
    changes = {"values": [[[0.5, -2.0], [1.0, 4e-4]]]}
    assert "NO" in answered(changes)[2] and "NO" not in answered(changes, tolerance=readers.TOLERANCE_LLAMA_CPP)[2]


def test_a_reader_that_is_not_there_or_fails_keeps_its_line(answered):
    missing = 'import json, sys\njson.dump({"missing": "No module named llama_cpp"}, sys.stdout)'
    assert answered(worker=missing) == ("not installed (No module named llama_cpp)", "–", "–", "–")
    assert answered(absent="not installed (--minimind2)") == ("not installed (--minimind2)", "–", "–", "–")
    version, *rest = answered(worker="raise ValueError('no such weight')")
    assert version == "**NO**: it failed (ValueError: no such weight)" and rest == ["–"] * 3


@pytest.mark.parametrize(
    "worker, said",
    [
        ("import time\ntime.sleep(60)", "it gave no answer within 1 seconds"),
        ("import os\nos.abort()", "it failed (exit code -6)"),
        ("", "no answer can be read (ValueError: nothing was printed)"),
        ("print('all is well')", "no answer can be read (JSONDecodeError: "),
        ("print(3)", "no answer can be read (TypeError: "),
        ("import sys\nsys.stdout.buffer.write(b'\\xff')", "no answer can be read (JSONDecodeError: "),
        (WORKER.replace("numpy.savez", "print"), "no answer can be read (FileNotFoundError: "),
        (WORKER.replace('request["ids"]', "[]"), "no answer can be read (ValueError: not every question is answered)"),
    ],
    ids=["slow", "crash", "silent", "text", "number", "bytes", "no logits", "one answer too few"],
)
def test_no_reader_loses_the_lines_of_the_others(worker, said, answered, tmp_path, monkeypatch):
    """Whatever it does, the table has a line for it that says so. The logits of the reader before are not its own."""
    if "sleep" in worker:
        monkeypatch.setattr(readers, "SECONDS", 1)
    if "abort" in worker and os.name != "posix":
        pytest.skip("another exit code")
    np.savez(tmp_path / "logits.npz", *LOGITS)
    version, *rest = answered(worker=worker)
    assert version.startswith(f"**NO**: {said}") and rest == ["–"] * 3


def test_the_public_code_is_that_of_the_checkout(tmp_path):
    """A package of that name in a folder whose name only begins alike is another one. The libraries are empty modules."""
    modules = {
        "model/model_minimind.py": "",
        "numpy.py": "",
        "torch.py": "def no_grad():\n    return lambda function: function",
        "transformers.py": "AutoTokenizer = None",
    }
    for name, content in modules.items():
        path = tmp_path / "minimind-2" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-P", str(readers.WORKERS / "minimind_worker.py")],
        input=json.dumps({"checkout": str((tmp_path / "minimind").resolve())}),
        env={**os.environ, "PYTHONPATH": str(tmp_path / "minimind-2")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == '{"missing": "no model/model_minimind.py in the checkout"}', done.stderr


def test_a_worker_finds_the_packages_of_its_folders_and_not_what_lies_beside_it(answered, tmp_path):
    """Reference: a module in each of the two."""
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "theirs.py").write_text("")
    probe = "import theirs\nfrom importlib.util import find_spec\nassert not find_spec('beside')\n" + WORKER
    assert answered(worker=probe, folders=[str(tmp_path / "given"), None])[0] == "9"


def test_documents_are_read_as_in_training(tmp_path):
    """Reference: the encoder's own way with texts that carry BOS and EOS."""
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("<|im_start|>one<|im_end|>", "two", "three"))
    )
    assert list(readers.read_files([str(path)], 2, encoder, tmp_path)) == ["one", "two"]


def test_a_weight_that_is_not_there_is_one_line(tmp_path):
    data = write_corpus(tmp_path / "data.jsonl", 3)
    with pytest.raises(UserError, match="none.pth: no such file"):
        readers.main(["--weight", str(tmp_path / "none.pth"), "--data_path", str(data)])


@pytest.mark.slow
def test_every_reader_that_is_there_agrees(older_transformers, tmp_path, monkeypatch, capsys):
    """MINIMIND2_CHECKOUT and MINIMIND3_CHECKOUT name states of the public repository; llama.cpp is there or not."""
    monkeypatch.setattr(readers, "SMALL", {"hidden_size": 64, "num_hidden_layers": 2})
    monkeypatch.setattr(readers, "KINDS", {name: readers.KINDS[name] for name in ("minimind2", "minimind3_moe")})
    data = write_corpus(tmp_path / "data.jsonl")
    arguments = ["--data_path", str(data), "--documents", "9", "--transformers4", str(older_transformers("4.57.3"))]
    checkouts = {name: os.environ.get(f"{name.upper()}_CHECKOUT") for name in ("minimind2", "minimind3")}
    for name, checkout in checkouts.items():
        if checkout:
            arguments += [f"--{name}", checkout]
    assert readers.main([*arguments, "--out", str(tmp_path / "table.md")]) == 0
    table = (tmp_path / "table.md").read_text()
    assert table.strip() in capsys.readouterr().out
    lines = table.splitlines()[2:]
    # A line for each of five readers and two weights, whether it is installed or not.
    assert len(lines) == 10
    for line in lines:
        if "transformers 4 |" in line:
            assert "| 4.57.3 | 12 of 12 |" in line
        if "transformers 5 |" in line:
            assert "12 of 12" in line
        if "llama.cpp |" in line:
            assert "12 of 12" in line or find_spec("llama_cpp") is None
        if "public" in line:
            assert "12 of 12" in line or "not installed (--minimind" in line
