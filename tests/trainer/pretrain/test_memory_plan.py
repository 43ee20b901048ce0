"""What a run needs on several ranks, before anything is made. References: what FSDP2 gathers, what the reducers take."""

import pytest
import torch

from model.config import MiniMindConfig
from trainer.machine.ranks import Ranks
from trainer.pretrain.memory_plan import MemoryPlan, MicroBatch
from trainer.pretrain.settings import parse_args

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
