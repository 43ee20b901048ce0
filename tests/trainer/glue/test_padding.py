"""What stands in the padding, and how much of it, changes nothing that an encoder gives: of tiny networks of 49 families
with random weights. Reference: each row alone, without padding."""

import json
from argparse import Namespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, ElectraForPreTraining
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import is_detectron2_available

from common.errors import UserError
from dataset.glue.glue_dataset import Batch
from dataset.glue.glue_tasks import QUESTIONS, TAGS, TASKS, Task
from model.checkpointing import recompute_layers
from model.electra import compiled_encoder
from model.electra.compiled_encoder import compile_layers
from trainer.glue import model as glue_model
from trainer.glue.layer_rates import depths
from trainer.glue.loss import forward, loss_sum
from trainer.glue.model import CLASSES, Layers, init_model
from trainer.glue.padding import (
    computes_in,
    inputs_of,
    with_equal_blocks,
    with_own_mask,
    with_ready_mask,
    without_padding,
)

VOCABULARY, PAD = 60, 0
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 80, "pad_token_id": PAD,
}  # fmt: skip
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": PAD}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
KNOWN = {
    "albert": {**BERT, "embedding_size": 16},
    "bert": BERT,
    "camembert": BERT,
    "distilbert": {**SMALL, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 80},
    "electra": {**BERT, "embedding_size": 16},
    "roberta": {**BERT, "type_vocab_size": 1},
    "xlm-roberta": {**BERT, "type_vocab_size": 1},
}
ONE_SEGMENT = {**BERT, "type_vocab_size": 1}
XLM = {**SMALL, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 80, "pad_index": PAD}
OWN_MASK = {
    "big_bird": {**BERT, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    "deberta": {**BERT, **DISENTANGLED},
    "deberta-v2": {**BERT, **DISENTANGLED, "position_buckets": 8, "share_att_key": True, "type_vocab_size": 0},
    "data2vec-text": ONE_SEGMENT,
    "ernie": BERT,
    "esmc": BERT,
    "eurobert": {**BERT, "num_key_value_heads": 2},
    "flaubert": XLM,
    "gte": BERT,
    "ibert": ONE_SEGMENT,
    "jina_embeddings_v3": ONE_SEGMENT,
    "layoutlm": BERT,
    "layoutlmv3": {**BERT, "coordinate_size": 4, "shape_size": 8},
    "lilt": {**BERT, "hidden_size": 48},
    "longformer": {**BERT, "attention_window": 8, "sep_token_id": 3},
    "luke": {**ONE_SEGMENT, "entity_vocab_size": 5, "entity_emb_size": 16},
    "markuplm": {**BERT, "xpath_unit_hidden_size": 8, "max_depth": 4},
    "megatron-bert": BERT,
    "modernbert": {**BERT, "global_attn_every_n_layers": 2, "local_attention": 8},
    "mpnet": BERT,
    "mra": {**BERT, "block_per_row": 2},
    "nomic_bert": BERT,
    "perceiver": {
        **SMALL, "d_model": 32, "d_latents": 32, "num_latents": 4, "num_blocks": 1, "num_self_attends_per_block": 1,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 80,
    },
    "rembert": {**BERT, "input_embedding_size": 16, "output_embedding_size": 16},
    "roberta-prelayernorm": ONE_SEGMENT,
    "roc_bert": {
        **BERT, "pronunciation_vocab_size": 9, "pronunciation_embed_dim": 8, "shape_vocab_size": 11, "shape_embed_dim": 8,
    },
    "roformer": {**BERT, "embedding_size": 32},
    "squeezebert": {**BERT, "embedding_size": 32},
    "tapas": BERT,
    "ultrabert": {**BERT, "sliding_window": 8},
    "xlm": XLM,
    "xlm-roberta-xl": ONE_SEGMENT,
    "xmod": {**ONE_SEGMENT, "languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip
# A stride over characters, convolutions, the share of [MASK], a Fourier transform, pooled positions, neighbours' embeddings,
# landmarks, the last position
MIXING = {
    # Its config has no vocab_size.
    "canine": {name: value for name, value in BERT.items() if name != "vocab_size"},
    "convbert": {**BERT, "embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 2},
    "esm": {**BERT, "position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4},
    "fnet": BERT,
    "funnel": {**SMALL, "block_sizes": [1, 1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
    "mobilebert": {**BERT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "nystromformer": {**BERT, "segment_means_seq_len": 4, "num_landmarks": 4, "conv_kernel_size": 3},
    "xlnet": {**SMALL, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "yoso": {**BERT, "hash_code_len": 4, "num_hash": 8, "use_expectation": True},
}  # fmt: skip
# By what they ask for; each has a test
REFUSED = ("layoutlmv2", "modernvbert", "reformer", "ultravbert")
REFORMER = {
    **SMALL, "hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8, "attn_layers": ["local", "local"],
    "axial_pos_embds": False, "feed_forward_size": 64, "local_attn_chunk_length": 4, "is_decoder": False,
    "max_position_embeddings": 80,
}  # fmt: skip
# Networks that read an end of the text from another token, or that know no padding
SEQ2SEQ = {
    **SMALL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 80,
}  # fmt: skip
NO_EOS = r"cannot compute examples of 24 tokens and less \(ValueError: Each example must contain .*<eos>"
NO_PADDING = (
    r"cannot compute several examples of 24 tokens and less together \(ValueError: .* no padding token is defined"
)
OTHERS = {
    "bart": (SEQ2SEQ, NO_EOS),
    "mbart": (SEQ2SEQ, NO_EOS),
    "mvp": (SEQ2SEQ, NO_EOS),
    "gpt2": ({"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80}, NO_PADDING),
    "bloom": ({"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, NO_PADDING),
}
# Those whose head for text is under another name than their own
DECODERS = {"mistral4": "its head that writes text is that of pictures and text"}
# Those that cannot compute in half precision
FLOAT32 = ("deberta", "xmod")
FAMILIES = {**KNOWN, **OWN_MASK, **MIXING}
NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
HEADS = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout")
LENGTHS = torch.tensor([20, 11, 6, 11])


def flags(folder, **changes):
    settings = {
        "model_path": folder, "max_seq_len": 64, "from_scratch": True, "dropout": None, "do_train": True,
        "head": "huggingface", "score_divisor": 1.0,
        "use_compile": "1", "shard": "none",
    }  # fmt: skip
    return Namespace(**{**settings, **changes})


def config_folder(tmp_path, family, **changes):
    AutoConfig.for_model(family, **{**FAMILIES[family], **changes}).save_pretrained(tmp_path)
    return tmp_path


def model_of(tmp_path, family, task=TASKS["mnli"], **changes):
    """A model for a task in eval mode, with weights large enough for differences to show."""
    folder = config_folder(tmp_path, family, **changes)
    torch.manual_seed(0)
    model, _ = init_model(flags(folder), task, folder, VOCABULARY)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def padded(T, filler=None):
    """A Batch of rows of LENGTHS with T positions. filler: a seed of the tokens that stand in place of the padding."""
    tokens = torch.randint(5, VOCABULARY, (len(LENGTHS), 64), generator=torch.Generator().manual_seed(1))[:, :T]
    mask = (torch.arange(T) < LENGTHS[:, None]).long()
    others = torch.full_like(tokens, PAD)
    if filler is not None:
        others = torch.randint(5, VOCABULARY, tokens.shape, generator=torch.Generator().manual_seed(filler))
    types = torch.zeros_like(tokens)
    types[:, 4:6] = 1
    return Batch(torch.where(mask.bool(), tokens, others), mask, types, torch.tensor([0, 1, 2, 1]))


def alone(model):
    """Logits of each row by itself."""
    rows = padded(64)
    parts = [Batch(*(t[r : r + 1, :n] for t in rows[:3]), rows.labels) for r, n in enumerate(LENGTHS.tolist())]
    return torch.cat([forward(model, part) for part in parts])


@torch.no_grad()
def differences(model):
    """How far the logits of several paddings are from those without."""
    reference = alone(model)
    assert reference.std() > 1e-3
    batches = [padded(20), padded(24), padded(24, filler=2), padded(40), padded(40, filler=3)]
    return [float((forward(model, batch) - reference).abs().max()) for batch in batches]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_logit(family, tmp_path):
    model = model_of(tmp_path, family)
    assert max(differences(model)) < 1e-5


NER = Task("ner", ("words",), "tags", ("B-A", "I-A", "O"), ("accuracy",), kind=TAGS)
SQUAD = Task("squad", ("question", "context"), "answers", (), ("f1",), kind=QUESTIONS)
WITH_HEADS = {
    task: [name for name in FAMILIES if CONFIG_MAPPING[name] in CLASSES[task.kind].configs] for task in (NER, SQUAD)
}
CASES = [(family, task) for task, families in WITH_HEADS.items() for family in families]
# Its head for questions wants three separators, as RoBERTa's own format has them.
CASES.remove(("longformer", SQUAD))


@torch.no_grad()
@pytest.mark.parametrize(("family", "task"), CASES, ids=lambda value: getattr(value, "folder", value))
def test_padding_changes_no_logit_of_a_word_or_an_answer(family, task, tmp_path):
    """Reference: each row alone."""
    model = model_of(tmp_path, family, task)
    rows = padded(64)
    parts = [Batch(*(t[r : r + 1, :n] for t in rows[:3]), rows.labels) for r, n in enumerate(LENGTHS.tolist())]
    reference = torch.cat([forward(model, part)[0] for part in parts])
    assert reference.shape == (LENGTHS.sum(), task.outputs) and reference.std() > 1e-3
    for batch in (padded(20), padded(24, filler=2), padded(40, filler=3)):
        assert (forward(model, batch)[batch.mask.bool()] - reference).abs().max() < 1e-5


def attention_of(model):
    """The names of the classes that a BigBird's layers attend with."""
    return {type(layer.attention.self).__name__ for layer in model.base_model.encoder.layer}


def test_a_bigbird_attends_in_blocks_whatever_was_computed_before(tmp_path):
    """Rows of more than (5 + 2 * 1) * 4 positions. Reference: a model of transformers that has seen no shorter row, which
    would have left it with full attention for good."""
    folder = config_folder(tmp_path, "big_bird", **dict.fromkeys(NO_DROPOUT, 0.0))
    torch.manual_seed(0)
    model, _ = init_model(flags(folder), TASKS["mnli"], folder, VOCABULARY)
    assert computes_in(model, torch.bfloat16, 64)
    depths(model, 64)
    # So large that the two kinds of attention differ much.
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    assert attention_of(model) == {"BigBirdBlockSparseAttention"}
    ids = torch.randint(5, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 50:] = 0
    batch = Batch(ids, mask, torch.zeros_like(ids), torch.tensor([0, 1]))

    def fresh():
        reference = type(model)(model.config)
        reference.load_state_dict(model.state_dict())
        return reference.train(model.training)

    for is_training in (False, True):
        model.train(is_training)
        forward(model, padded(24))
        assert attention_of(model) == {"BigBirdSelfAttention"}
        rows = [Batch(*(t[r : r + 1, :n] for t in batch[:3]), batch.labels) for r, n in enumerate((64, 50))]
        wanted = torch.cat([fresh()(**inputs_of(model, row, row.mask)).logits for row in rows])
        # Going to and fro draws no random number.
        state = torch.get_rng_state()
        found = forward(model, batch)
        assert attention_of(model) == {"BigBirdBlockSparseAttention"}
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(found, wanted)
        full = fresh()
        full.base_model.set_attention_type("original_full")
        assert (full(**inputs_of(full, rows[0], rows[0].mask)).logits - wanted[0]).abs().max() > 1e-2
        filled = batch._replace(ids=ids.masked_fill(mask == 0, 7))
        torch.testing.assert_close(forward(model, filled), found)
    found.sum().backward()
    named = dict(model.named_parameters())
    assert len(named) == len(list(model.parameters())) and all(p.device.type == "cpu" for p in named.values())
    assert named["bert.encoder.layer.0.attention.self.query.weight"].grad.abs().sum() > 0
    assert model.config.attention_type == "block_sparse"


def test_layers_of_a_bigbird_that_are_computed_again_attend_as_before(tmp_path):
    """A batch with rows that are too short for blocks and rows that are not. Reference: the gradients without
    --gradient_checkpointing."""
    ids = torch.randint(5, VOCABULARY, (3, 60), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(60) < torch.tensor([20, 60, 40])[:, None]).long()
    batch = Batch(ids, mask, torch.zeros_like(ids), torch.tensor([0, 1, 2]))
    found = []
    for again in (False, True):
        model = model_of(tmp_path, "big_bird", **dict.fromkeys((*NO_DROPOUT, *HEADS), 0.0)).train()
        if again:
            recompute_layers(model)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss_sum(TASKS["mnli"], forward(model, batch), batch.labels).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found[0], found[1])


def test_every_family_with_a_head_for_sentences_is_in_a_table():
    """One that a later transformers brings is to be tried, and named here and in docs/finetuning.md. The others write text and
    fill in no masked word: decoders, and encoders with one, whose tokenizers put no CLS first or which read the end."""
    writes = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    decoders = writes - set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    of_sentences = set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    assert set(FAMILIES) <= of_sentences
    assert sorted(of_sentences - set(FAMILIES) - {*OTHERS, *DECODERS, *REFUSED} - decoders) == []


def test_a_family_that_wants_a_package_is_refused_with_its_name(tmp_path, monkeypatch):
    """LayoutLMv2's pictures."""
    if is_detectron2_available():
        pytest.skip("detectron2 is there")
    monkeypatch.setitem(FAMILIES, "layoutlmv2", BERT)
    with pytest.raises(
        UserError, match="no model can be made of its config .ImportError: LayoutLMv2Model requires the det"
    ):
        model_of(tmp_path, "layoutlmv2")


@pytest.mark.parametrize("family", ["modernvbert", "ultravbert"])
def test_a_family_of_pictures_and_text_is_refused(family, tmp_path, monkeypatch):
    """Its layers would be told from those of the other network by nothing but their number."""
    monkeypatch.setitem(FAMILIES, family, {})
    with pytest.raises(UserError, match=f"{family} consists of several networks, as for pictures and text; name an"):
        model_of(tmp_path, family)


def test_a_family_without_its_language_is_refused(tmp_path):
    """X-MOD's published configs name none."""
    with pytest.raises(UserError, match="Input language unknown. Please call"):
        model_of(tmp_path, "xmod", default_language=None)


def test_a_family_without_a_fitting_head_is_refused(tmp_path):
    with pytest.raises(UserError, match="transformers has no head for tags to perceiver; name another encoder"):
        model_of(tmp_path, "perceiver", NER)
    with pytest.raises(UserError, match="AssertionError: There should be exactly three separator tokens"):
        model_of(tmp_path, "longformer", SQUAD)


def test_a_family_that_can_be_evaluated_alone_is_not_trained(tmp_path, monkeypatch):
    """A Reformer pads rows to a multiple of its chunks, but not while it trains."""
    monkeypatch.setitem(FAMILIES, "reformer", REFORMER)
    with pytest.raises(UserError, match=r"cannot train on examples of 24 tokens and less \(ValueError: If training"):
        model_of(tmp_path, "reformer")
    torch.manual_seed(0)
    model, _ = init_model(flags(tmp_path, do_train=False), TASKS["mnli"], tmp_path, VOCABULARY)
    assert max(differences(model.eval())) < 1e-5


@pytest.mark.parametrize("family", OTHERS)
def test_networks_that_are_no_encoders_are_refused_with_their_own_reason(family, tmp_path, monkeypatch):
    settings, reason = OTHERS[family]
    monkeypatch.setitem(FAMILIES, family, settings)
    with pytest.raises(UserError, match=reason):
        model_of(tmp_path, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_gradient(family, tmp_path):
    """Reference: the gradients of the rows by themselves. Without dropout, whose masks depend on a batch's shape."""
    model, batch = model_of(tmp_path, family), padded(24, filler=2)

    def gradients(logits):
        model.zero_grad(set_to_none=True)
        loss_sum(TASKS["mnli"], logits, batch.labels).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    found = gradients(forward(model, batch))
    assert found and all(grad.isfinite().all() for grad in found.values())
    torch.testing.assert_close(found, gradients(alone(model)), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_padding_changes_rounding_alone(family, tmp_path):
    """Those that cannot compute in bf16 are found."""
    model = model_of(tmp_path, family)
    assert computes_in(model, torch.bfloat16, 64) == (family not in FLOAT32)
    if family in FLOAT32:
        return
    with torch.autocast("cpu", torch.bfloat16):
        scale = float(alone(model).abs().max())
        assert max(differences(model)) < 0.05 * scale


@pytest.mark.parametrize("family", KNOWN)
def test_padding_changes_nothing_in_compiled_layers(family, tmp_path, monkeypatch):
    """The compiled form of attention and dropout, run by eager kernels. Reference: the same model, not compiled."""
    compiled, compile_it = [], torch.nn.Module.compile

    def quick(module):
        compiled.append(module)
        compile_it(module, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", quick)
    fields = ("dropout", "attention_dropout") if family == "distilbert" else NO_DROPOUT
    model = model_of(tmp_path, family, **dict.fromkeys((*fields, *HEADS), 0.0)).train()
    reference = forward(model, padded(24))
    Layers(model).compile_training((4, 24))
    assert compiled or family == "albert"  # whose layers are one, under another name
    for filler in (None, 2):
        torch.testing.assert_close(forward(model, padded(24, filler)), reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", KNOWN)
def test_short_rows_in_bf16_are_attended_quickly(family, tmp_path, monkeypatch):
    """And to the same: loss and gradients but for rounding. Reference: the same model with transformers' SDPA."""
    fields = ("dropout", "attention_dropout") if family == "distilbert" else NO_DROPOUT
    model = model_of(tmp_path, family, **dict.fromkeys((*fields, *HEADS), 0.0)).train()

    def gradients():
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(model, padded(24)).float().square().sum()
        return torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
                if g is not None
            ]
        )

    with monkeypatch.context() as context:
        context.setattr(compiled_encoder, "sdpa_attention_forward", None)
        found = gradients()
    model.config._attn_implementation = "sdpa"
    wanted = gradients()
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_a_compiled_encoder_does_not_drop_a_mask_of_rows_and_positions():
    """transformers leaves the mask out for an implementation of attention that registers none."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("electra", **FAMILIES["electra"])
    model = ElectraForPreTraining(config).eval()
    compile_layers(model)
    with torch.compiler.set_stance("force_eager"):
        found = [model(input_ids=b.ids, attention_mask=b.mask).logits for b in (padded(24), padded(24, filler=2))]
    real = padded(24).mask.bool()
    torch.testing.assert_close(found[0][real], found[1][real], atol=1e-6, rtol=1e-6)


def test_ways_are_those_of_the_families(tmp_path):
    """The quick one for the known ones alone; a config that asks for eager attention gets its own mask."""
    ways = {family: model_of(tmp_path / family, family).padding_way for family in FAMILIES}
    assert {family for family, way in ways.items() if way is with_ready_mask} == set(KNOWN)
    assert {family for family, way in ways.items() if way is without_padding} == set(MIXING)
    assert [family for family, way in ways.items() if way is with_equal_blocks] == ["big_bird"]
    folder = config_folder(tmp_path / "eager", "bert")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "attn_implementation": "eager"}))
    model, _ = init_model(flags(folder), TASKS["mnli"], folder, VOCABULARY)
    assert model.config._attn_implementation == "eager" and model.padding_way is with_own_mask
    assert max(differences(model.eval())) < 1e-5


def test_what_cannot_be_computed_is_refused_with_the_encoders_reason(tmp_path):
    """A Nystromformer with landmarks wants rows of one length alone."""
    with pytest.raises(UserError) as refused:
        model_of(tmp_path, "nystromformer", segment_means_seq_len=16)
    assert "cannot compute examples of 24 tokens and less (RuntimeError: " in str(refused.value)


def test_a_family_that_mixes_padding_and_one_without_a_compiled_form_are_named(tmp_path):
    lines = {}
    for family in ("bert", "mpnet", "big_bird", "fnet"):
        folder = config_folder(tmp_path / family, family)
        found = glue_model.check_models(flags(folder), [TASKS["cola"]], folder, VOCABULARY)
        lines[family] = " ".join(found.lines)
    assert lines["bert"] == ""
    assert lines["mpnet"] == "MPNetForSequenceClassification has no compiled form here: training without torch.compile"
    assert (
        "attends in blocks of 4 tokens where an example has more than 28: examples of as many blocks"
        in lines["big_bird"]
    )
    assert "FNetForSequenceClassification lets padding into its outputs" in lines["fnet"]
    with pytest.raises(
        UserError, match="--shard: FNetForSequenceClassification computes examples of like length together"
    ):
        glue_model.check_models(flags(folder, shard="full"), [TASKS["cola"]], folder, VOCABULARY)
