"""The scripts that compute, started on a machine with one GPU without --device: see simulated_cuda.py. Reference: the CPU."""

import json

from scripts import evaluate, generate, play
from scripts.arguments import play_parser
from scripts.generate import Sampling
from tests.trainer.machine.simulated_cuda import simulated_cuda

PAIR = {"sentence_good": "the cat sat on the mat", "sentence_bad": "the cat sat the on mat"}


def test_generate(weight, capsys):
    flags = ["--weight", weight, "the cat", "--max_new_tokens", "8", "--seed", "1", "--dtype", "float32"]
    with simulated_cuda() as cuda:
        assert generate.main(flags) == 0
    there = capsys.readouterr().out
    assert cuda.mode.asked > 0
    assert generate.main([*flags, "--device", "cpu"]) == 0
    assert there == capsys.readouterr().out != ""


def test_evaluate(weight, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps(PAIR) + "\n") * 3)
    flags = ["pairs", "--weight", weight, "--data_path", str(data), "--dtype", "float32"]
    with simulated_cuda() as cuda:
        assert evaluate.main([*flags, "--out", str(tmp_path / "there")]) == 0
    assert cuda.mode.asked > 0
    assert evaluate.main([*flags, "--out", str(tmp_path / "here"), "--device", "cpu"]) == 0
    there, here = (json.loads((tmp_path / f"{name}.json").read_text())["metrics"] for name in ("there", "here"))
    assert there == here and there


def test_play(weight, tmp_path):
    request = {"text": "the cat", "seed": 1, "sampling": Sampling(8, 0.8, 0.9)}
    flags = ["--port", "0", "--weight", weight, "--out_dir", str(tmp_path), "--dtype", "float32"]

    def text_written(*more):
        pieces = []
        with play.open_server(play_parser().parse_args([*flags, *more])) as server:
            server.models[0].write(request, pieces.append)
        return "".join(piece["text"] for piece in pieces)

    with simulated_cuda() as cuda:
        there = text_written()
    assert cuda.mode.asked > 0
    assert there == text_written("--device", "cpu") != ""
