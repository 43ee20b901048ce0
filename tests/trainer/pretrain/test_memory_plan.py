"""What a run needs on several ranks, before anything is made. References: what FSDP2 gathers, what the reducers take."""

import sys

import pytest
import torch

from model.config import MiniMindConfig, parameter_count
from model.model_minimind import MiniMindForCausalLM
from trainer.machine.ranks import Ranks
from trainer.pretrain.memory import training_memory
from trainer.pretrain.memory_plan import MemoryPlan, MicroBatch
from trainer.pretrain.settings import parse_args
from trainer.shared_reducer import shared_gradient_bytes

CPU = torch.device("cpu")
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 1000}


def needed(config, ranks, group_size=1):
    settings = parse_args(["--optimizer", "adamw", "--use_compile", "0"])
    plan = MemoryPlan(settings, torch.float32, CPU, ranks, group_size)
    return plan.needed(MicroBatch(config, 4, 32, False))


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_a_rank_with_a_part_of_the_model_gathers_a_head_of_its_own_too(layers):
    """It is in no layer, as the embeddings: its weights and gradients are whole, whatever the number of layers.
    Beside them lie the rank's half of weights, gradients and AdamW's two moments."""
    tied, untied = (
        needed(MiniMindConfig(**{**SMALL, "num_hidden_layers": layers}, tie_word_embeddings=is_tied), Ranks(0, 0, 2), 2)
        for is_tied in (True, False)
    )
    assert untied - tied == 1000 * 64 * (4 * 4 // 2 + 2 * 4)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone")
def test_ranks_of_torchrun_on_one_machine_share_memory_for_their_gradients():
    """Each counts its part of it, since each may use its part of the machine."""
    config = MiniMindConfig(**SMALL)
    parameters = list(MiniMindForCausalLM(config).parameters())
    assert sum(p.numel() for p in parameters) == parameter_count(config)
    alone = needed(config, Ranks())
    for n in (2, 4):
        launched = needed(config, Ranks(0, 0, n, on_one_machine=True, local_world_size=n))
        # Muon's matrices may lie there too.
        assert launched - alone == pytest.approx(shared_gradient_bytes(parameters, n) / n, rel=0.2)
        copies = needed(config, Ranks(0, 0, n, sharing=n, on_one_machine=True))
        of_copy = training_memory(
            config, 4 // n, 32, "adamw", compiled=False, gradient_checkpointing=False, half=4
        ).total
        assert copies - n * of_copy == pytest.approx(shared_gradient_bytes(parameters, n), rel=0.2)
    # On several machines gradients travel in the buckets in which they lie.
    assert needed(config, Ranks(0, 0, 4, local_world_size=2)) == alone


def test_a_gpu_needs_no_shared_memory():
    plan = MemoryPlan(parse_args([]), torch.bfloat16, torch.device("meta"), Ranks(0, 0, 2, on_one_machine=True))
    alone = MemoryPlan(parse_args([]), torch.bfloat16, torch.device("meta"))
    batch = MicroBatch(MiniMindConfig(**SMALL), 4, 32, False)
    assert plan.needed(batch) == alone.needed(batch)
