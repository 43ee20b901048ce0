"""Both trainers on a machine with one GPU, which simulated_cuda.py plays."""

import torch

from tests.encoders.electra.test_command import train
from tests.encoders.electra.test_examples import write_lines, write_vocab
from tests.encoders.glue.glue_helpers import fine_tune, make_place
from tests.trainer.machine.simulated_cuda import simulated_cuda


def test_electra_starts_and_ends_there(tmp_path):
    data, vocabulary = write_lines(tmp_path / "data.jsonl")[0], write_vocab(tmp_path / "vocab.txt")
    with simulated_cuda() as cuda:
        run = train(data_path=data, vocab_path=vocabulary, out_dir=tmp_path / "out", device=None, max_steps=2)
    assert run.engine.device == torch.device("cuda", 0) and cuda.chosen[0] == 0
    assert run.progress.update == 2


def test_fine_tuning_starts_and_ends_there(tmp_path):
    place = make_place(tmp_path / "glue")
    with simulated_cuda() as cuda:
        fine_tune(place, tmp_path / "gpu", device="cuda", epochs=1)
    assert cuda.chosen[0] == 0 and cuda.mode.asked > 0
