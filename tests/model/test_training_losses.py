"""training_losses, packing, precision and the other promises to the trainers, against plain PyTorch and padded rows."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dataset.batches import Batch
from dataset.packing import Totals
from model import loss as loss_module
from model.loss import chunked_cross_entropy
from tests.helpers import a_document_a_row, tiny_model
from trainer.pretrain.loss import pretrain_loss

KINDS = {
    "minimind2": {},
    "minimind3": {"generation": "minimind3", "head_dim": 16},
    "minimind2_moe": {"use_moe": True},
    "minimind2_top1": {"use_moe": True, "num_experts_per_tok": 1},
    "minimind3_moe": {"generation": "minimind3", "use_moe": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def tiny(kind="minimind2", **fields):
    sizes = {"vocab_size": 61, "num_key_value_heads": 2}
    return tiny_model(**{**sizes, **KINDS[kind], **fields})


def gradients(model):
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


def batches():
    """Documents of 9, 14, 5, 20, 3 tokens: (packed rows of 24 positions, a padded row per document)."""
    torch.manual_seed(1)
    documents = [torch.randint(3, 61, (n,)) for n in (9, 14, 5, 20, 3)]

    def rows(plan, width):
        ids, targets = torch.zeros(len(plan), width, dtype=torch.long), torch.full((len(plan), width), -100)
        document_ids, position_ids = torch.full((len(plan), width), -1), torch.zeros(len(plan), width, dtype=torch.long)
        for row, members in enumerate(plan):
            at = 0
            for number, index in enumerate(members):
                document = documents[index]
                span = slice(at, at + len(document) - 1)
                ids[row, span], targets[row, span] = document[:-1], document[1:]
                document_ids[row, span], position_ids[row, span] = number, torch.arange(len(document) - 1)
                at = span.stop
        return ids, targets, document_ids, position_ids

    return rows([[0, 1], [2, 3]], 24), rows([[4]], 24), rows([[0], [1], [2], [3], [4]], 19)


@every_kind
def test_packed_rows_give_the_losses_and_gradients_of_padded_rows(kind):
    """Summed losses and gradients at 1e-5; the auxiliary loss counts no padding."""
    first, second, padded = batches()
    model = tiny(kind, router_aux_loss_coef=0.1)
    packed = tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
    ids, targets, document_ids, position_ids = packed
    loss, aux_loss = model.training_losses(ids, targets, document_ids, position_ids)
    (loss + aux_loss).backward()
    got = gradients(model)
    padded_loss, padded_aux = model.training_losses(*padded)
    (padded_loss + padded_aux).backward()
    torch.testing.assert_close((loss, aux_loss), (padded_loss, padded_aux), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(got, gradients(model), atol=1e-5, rtol=1e-5)
    assert (aux_loss > 0) == ("moe" in kind or "top1" in kind)


def test_dropout_drops_in_training_alone():
    model, ids = tiny(dropout=0.5), torch.randint(3, 61, (2, 8))
    for is_training in (True, False):
        model.train(is_training)
        # The modules are switched off, so that what differs is drawn by the attention.
        rates = {module.eval().p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        first, second = (model.training_losses(ids, ids, *a_document_a_row(ids))[0] for _ in range(2))
        assert (first != second) == is_training and rates == {0.5}


@every_kind
def test_empty_rows_change_nothing(kind):
    """As the last micro-batch of an epoch is filled up on a GPU. Reference: the batch as it is; counts to the bit."""
    parts = batches()[0]
    batch = Batch(*parts, n_targets=int((parts[1] != -100).sum()), n_documents=4)
    empty = (0, -100, -1, 0)
    filled = [torch.cat((part, torch.full((3, 24), value))) for part, value in zip(parts, empty, strict=True)]
    model = tiny(kind, router_aux_loss_coef=0.1)
    totals = Totals(targets=100, documents=9)
    found = []
    for rows in (batch, Batch(*filled, batch.n_targets, batch.n_documents)):
        loss, sums = pretrain_loss(model, rows, totals)
        loss.backward()
        found.append((loss, sums, gradients(model)))
    (loss, sums, grads), (filled_loss, filled_sums, filled_grads) = found
    # Targets, documents, and the tokens of each expert
    assert torch.equal(sums[2:], filled_sums[2:])
    torch.testing.assert_close((filled_loss, filled_sums[:2]), (loss, sums[:2]), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(filled_grads, grads, atol=1e-5, rtol=1e-6)


@every_kind
def test_a_batch_of_padding_only_is_harmless(kind):
    model = tiny(kind)
    ids = torch.zeros(2, 6, dtype=torch.long)
    nothing = torch.full_like(ids, -100)
    loss, aux_loss = model.training_losses(ids, nothing, torch.full_like(ids, -1), torch.zeros_like(ids))
    (loss + aux_loss).backward()
    assert loss.item() == 0 and aux_loss.item() == 0
    assert all(g.abs().max() == 0 for g in gradients(model).values())
    assert model(ids, labels=nothing).loss.item() == 0


def test_chunked_cross_entropy_is_the_plain_one(monkeypatch):
    """Value and gradients against F.cross_entropy, with a ragged last chunk and ignored targets."""
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 7)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(0, 11, (23,))
    targets[[0, 5, 22]] = -100
    mine = chunked_cross_entropy(hidden, weight, targets)
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(mine, plain)
    both = [torch.autograd.grad(0.3 * loss, (hidden, weight)) for loss in (mine, plain)]
    torch.testing.assert_close(*both)


def test_in_float16_the_gradient_of_a_gpus_chunk_is_finite(monkeypatch):
    """Its rows all add to one number, which a float16 does not hold. Reference: the loss in float32, where one chunk is too."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *what: loss_module.GPU_CHUNK_ROWS)
    n = loss_module.GPU_CHUNK_ROWS
    hidden = torch.full((n, 4), 8.0)
    targets = torch.zeros(n, dtype=torch.long)
    gradients = []
    for dtype in (torch.float16, torch.float32):
        weight = torch.zeros(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.float16, enabled=dtype is torch.float16):
            loss = chunked_cross_entropy(hidden, weight, targets)
        gradients += torch.autograd.grad(loss, weight)
    assert gradients[1].abs().max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-3, atol=0)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operator gives, also in a backward pass."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return results


def test_no_whole_block_of_fp32_logits(monkeypatch):
    """The largest tensor that training_losses allocates has `chunk_rows` rows of the vocabulary, not B*T."""
    net = tiny(vocab_size=1009)
    ids = torch.randint(0, 1009, (8, 64))
    # An evaluation has as many logits, and fewer rows, with a larger vocabulary.
    monkeypatch.setattr(loss_module, "EVALUATED_LOGITS", 128 * 1009)
    with Largest() as evaluated, torch.no_grad():
        loss = net.training_losses(ids, ids, *a_document_a_row(ids))[0]
    assert 0 < evaluated.numbers <= 128 * 1009
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 16)
    with Largest() as largest:
        trained = net.training_losses(ids, ids, *a_document_a_row(ids))
        sum(trained).backward()
    assert 0 < largest.numbers < 8 * 64 * 1009 / 4
    torch.testing.assert_close(loss, trained[0])


@every_kind
def test_residual_stream_stays_fp32_under_autocast(kind):
    model = tiny(kind)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: seen.extend([args[0].dtype, out[0].dtype]))
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: seen.append((out.dtype,)))
    ids = torch.randint(3, 61, (2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        loss, aux_loss = model.training_losses(ids, ids, *a_document_a_row(ids))
    (loss + aux_loss).backward()
    assert {d for d in seen if not isinstance(d, tuple)} == {torch.float32}
    assert {d for d in seen if isinstance(d, tuple)} == {(torch.bfloat16,)}  # while the products are half precision
    assert loss.dtype == aux_loss.dtype == torch.float32
    exact = model.training_losses(ids, ids, *a_document_a_row(ids))[0]
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_labels_give_a_loss_and_unknown_arguments_an_error():
    """Hugging Face semantics: shifted inside, -100 ignored, mean; or the sum over num_items_in_batch."""
    model = tiny().eval()
    ids = torch.randint(3, 61, (2, 8))
    labels = ids.clone()
    labels[0, :4] = -100
    logits = model(ids).logits
    reference = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=labels).loss, reference)
    kept = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=2 * kept).loss, reference / 2)
    assert model(ids).loss is None and model(ids).aux_loss.dim() == 0
    with pytest.raises(TypeError):
        model(ids, label=labels)
    # Hugging Face's Trainer shifts smoothed labels of the classes there.
    assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def test_lengths_beyond_the_positions_get_a_message():
    model = tiny(max_position_embeddings=8)
    ids = torch.randint(3, 61, (1, 9))
    for call in (lambda: model(ids), lambda: model.training_losses(ids, ids, *a_document_a_row(ids))):
        with pytest.raises(ValueError, match="^9 positions, but max_position_embeddings is 8") as error:
            call()
        assert "\n" not in str(error.value)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="9 positions"):
        model(ids[:, 6:], past_key_values=cache)


@pytest.mark.parametrize("generation, spread", [("minimind2", None), ("minimind3", 0.02)])
def test_initialisation_is_that_of_the_generation(generation, spread):
    """minimind2: uniform ±1/sqrt(fan_in) as nn.Linear draws it; minimind3: normal(0, 0.02). Norms are ones."""
    model = tiny(generation, use_moe=True, vocab_size=500, hidden_size=128, num_attention_heads=4)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        bound = parameter.shape[1] ** -0.5
        expected = spread if spread else bound / 3**0.5
        assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
        assert spread or parameter.abs().max() <= bound
    assert model.lm_head.weight is model.model.embed_tokens.weight
