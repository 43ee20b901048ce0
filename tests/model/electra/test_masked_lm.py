"""The masked language model. References: Hugging Face's ElectraForMaskedLM, torch's own counter of operations."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, ElectraForMaskedLM

from model.electra.masked_lm import MaskedLanguageModel, flops_per_token
from model.electra.masking import IGNORE, mask_count, mask_tokens
from model.electra.model_electra import configs
from model.electra.pretrainer import judge_guesses
from model.electra.sizes import SIZES
from tests.model.electra.test_model_electra import batch, random_examples


def tiny(seed=0, position_init="normal", **options):
    """A MaskedLanguageModel of two layers of width 32 without dropout."""
    torch.manual_seed(seed)
    sizes = {"layers": 2, "width": 32, "heads": 4, "ffn": 64, "embedding": 16}
    _, config = configs(SIZES["small"], 60, position_init=position_init, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return MaskedLanguageModel.from_config(config, **options).train()


@pytest.mark.parametrize("style", ["electra", "bert"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_the_loss_is_hugging_faces(style, dtype, tolerance):
    """Loss and gradients, on rows of different lengths: ElectraForMaskedLM with labels at the masked positions."""
    ids, lengths, masked = random_examples(style=style)
    ours = tiny()
    theirs = ElectraForMaskedLM(ours.encoder.config)
    theirs.load_state_dict(ours.encoder.state_dict())
    labels = torch.full(ids.shape, IGNORE)
    used = masked.labels != IGNORE
    rows, columns = np.nonzero(used)
    labels[rows, masked.positions[rows, columns]] = torch.from_numpy(masked.labels[rows, columns])
    visible = torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = ours(*batch(ids, lengths, masked))
        wanted = theirs(torch.from_numpy(masked.ids), attention_mask=visible, labels=labels)
    assert (found.loss / used.sum()).item() == pytest.approx(wanted.loss.item(), rel=tolerance)
    likeliest = wanted.logits.argmax(-1)
    if dtype == torch.float32:
        assert int(found.correct) == int((likeliest == labels).sum())
        (found.loss / int(used.sum())).backward()
        wanted.loss.backward()
        gradients = dict(theirs.named_parameters())
        for name, parameter in ours.encoder.named_parameters():
            assert torch.allclose(parameter.grad, gradients[name].grad, atol=1e-6), name


def test_smoothed_labels():
    """Reference: torch's cross-entropy of smoothed labels, on Hugging Face's logits at the masked positions."""
    ids, lengths, masked = random_examples(R=1)
    smooth = tiny(smoothing=0.1)
    found = smooth(*batch(ids, lengths, masked))
    used = masked.labels[0] != IGNORE
    visible = torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None]).long()
    logits = smooth.encoder(torch.from_numpy(masked.ids), attention_mask=visible).logits[0, masked.positions[0, used]]
    wanted = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(masked.labels[0, used]), reduction="sum", label_smoothing=0.1
    )
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_flops_are_those_of_the_layers():
    """Reference: torch's own counter on a forward and backward pass of full rows, which leaves out attention on a CPU."""
    R, T = 4, 24
    ids = np.random.default_rng(0).integers(5, 60, (R, T))
    K = int(mask_count(T, 0.15))
    random = np.random.Philox(1).random_raw(R * (T + 2 * K)).reshape(R, -1)
    masked = mask_tokens(ids, np.full(R, T), ids >= 5, 0.15, "electra", 4, np.arange(5, 60), random)
    model = tiny()
    with FlopCounterMode(display=False) as counter:
        model(*batch(ids, np.full(R, T), masked)).loss.backward()
    attention = 12 * 2 * T * 32 * R * T
    ours = flops_per_token(model.encoder.config, T, K / T) * R * T
    assert ours == pytest.approx(counter.get_total_flops() + attention, rel=1e-2)


def test_it_is_saved_for_transformers_and_read_again(tmp_path):
    """AutoModel gets the encoder without its head; positions begin as sinusoids where the config says so."""
    model = tiny(position_init="sinusoidal")
    model.encoder.save_pretrained(tmp_path / "encoder")
    again = MaskedLanguageModel.from_pretrained(tmp_path)
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert again.encoder.generator_lm_head.weight is again.encoder.electra.embeddings.word_embeddings.weight
    plain = AutoModel.from_pretrained(tmp_path / "encoder").state_dict()
    for name, value in model.encoder.electra.state_dict().items():
        assert torch.equal(plain[name], value), name
    positions = model.encoder.electra.embeddings.position_embeddings.weight
    assert positions[0, :2].tolist() == pytest.approx([0, 0.02 * 2**0.5], abs=1e-6)


def test_of_several_likeliest_tokens_the_right_one_is_a_share_of_1():
    """Half precision makes some alike. Places without a label count for nothing."""
    logits = torch.tensor(
        [[1.0, 3.0, 2.0], [5.0, 5.0, 0.0], [5.0, 5.0, 5.0], [1.0, 3.0, 2.0], [9.0, 0.0, 0.0]], dtype=torch.bfloat16
    )
    labels = torch.tensor([1, 0, 2, 0, IGNORE])
    loss, correct = judge_guesses(logits, labels)
    assert correct.item() == pytest.approx(1 + 1 / 2 + 1 / 3)
    wanted = torch.nn.functional.cross_entropy(logits[:4].float(), labels[:4], reduction="sum")
    assert loss.item() == pytest.approx(wanted.item())
