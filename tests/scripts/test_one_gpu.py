"""The scripts that compute, started on a machine with one GPU without --device: see simulated_cuda.py. Reference: the CPU."""

from scripts import generate
from tests.trainer.machine.simulated_cuda import simulated_cuda


def test_generate(weight, capsys):
    flags = ["--weight", weight, "the cat", "--max_new_tokens", "8", "--seed", "1", "--dtype", "float32"]
    with simulated_cuda() as cuda:
        assert generate.main(flags) == 0
    there = capsys.readouterr().out
    assert cuda.mode.asked > 0
    assert generate.main([*flags, "--device", "cpu"]) == 0
    assert there == capsys.readouterr().out != ""
