"""Reading any text with a run's networks. References: the networks of transformers called by hand, window by window."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertModel, ElectraForSequenceClassification

from common.errors import UserError
from dataset.tokenizing.wordpiece import save_wordpiece
from model.electra.detection import usual_threshold
from model.electra.masking import mask_count
from model.electra.sampling import sample
from tests.trainer.electra.electra_folder import write_run
from trainer.electra.detector import open_detector

CPU = torch.device("cpu")
TEXT = "The cat sat on a mat, while dogs ran over far hills."


def opened(folder):
    return open_detector("--model", str(folder), CPU)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Its initial weights are so small that all words would look alike."""
    return write_run(tmp_path_factory.mktemp("run"))


def test_a_short_text_is_read_as_a_whole(run):
    """Reference: the pipeline of the documents, transformers' own."""
    folder, model, tokenizer = run
    passage = opened(folder).passage(TEXT)
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        wanted = model.discriminator(**inputs).logits.sigmoid()[0, 1:-1].tolist()
    of_words = {}
    for i, word in enumerate(inputs.word_ids()[1:-1]):
        of_words[word] = max(of_words.get(word, 0), wanted[i])
    assert [word.probability for word in passage.words] == pytest.approx(list(of_words.values()), rel=1e-5)
    assert "".join(word.before + word.text for word in passage.words) + passage.after == TEXT
    assert passage.threshold == usual_threshold(list(of_words.values()))
    assert not passage.is_corrupted and not any(word.is_replaced for word in passage.words)


@pytest.mark.parametrize("length", [3, 6, 11, 40])
def test_a_long_text_is_read_in_windows_of_the_trained_length(tmp_path, length):
    """Reference: of each token, the row with most text around it, computed alone."""
    folder, model, tokenizer = write_run(tmp_path, length=length)
    detector = opened(folder)
    ids = np.array(tokenizer(" ".join([TEXT] * 9), add_special_tokens=False)["input_ids"])
    found = detector.probabilities(ids)
    room = length - 2
    stride = max(room // 2, 1)
    begins = [0]
    while begins[-1] + room < len(ids):
        begins.append(begins[-1] + stride)
    rows = {}
    for token in range(len(ids)):
        holds = [begin for begin in begins if begin <= token < min(begin + room, len(ids))]
        begin = max(holds, key=lambda begin: min(token - begin, min(begin + room, len(ids)) - 1 - token))
        if begin not in rows:
            row = [tokenizer.cls_token_id, *ids[begin : begin + room].tolist(), tokenizer.sep_token_id]
            with torch.no_grad():
                rows[begin] = model.discriminator(torch.tensor([row])).logits.sigmoid()[0, 1:-1]
        assert found[token] == pytest.approx(float(rows[begin][token - begin]), rel=1e-4)


def test_the_generator_writes_what_it_draws(run):
    """Reference: its logits for the masked text, and `sample`."""
    folder, model, tokenizer = run
    detector = opened(folder)
    ids = np.array(tokenizer(" ".join([TEXT] * 3), add_special_tokens=False)["input_ids"])
    given = {}

    def drawn(masked_ids, positions, originals):
        given.update(masked=masked_ids.copy(), positions=positions.copy())
        assert (originals == ids[positions]).all()
        return type(detector)._drawn(detector, masked_ids, positions, originals)

    detector._drawn = drawn
    before = torch.random.get_rng_state()
    corrupted = detector.with_replaced(ids, 0.3, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    positions = given["positions"]
    assert len(positions) == mask_count(len(ids), 0.3) and (np.diff(positions) > 0).all()
    is_masked = given["masked"] != ids
    assert is_masked.sum() > 0 and not np.delete(is_masked, positions).any()
    assert (given["masked"][is_masked] == tokenizer.mask_token_id).all()
    row = [tokenizer.cls_token_id, *given["masked"].tolist(), tokenizer.sep_token_id]
    with torch.no_grad():
        logits = model.generator(torch.tensor([row])).logits[0, 1 + positions]
    torch.manual_seed(5)
    assert corrupted[positions].tolist() == sample(logits).tolist()
    assert (np.delete(corrupted, positions) == np.delete(ids, positions)).all()


@pytest.mark.parametrize("has_generator", [True, False])
def test_what_was_replaced_is_known(tmp_path, has_generator):
    """Reference: the tokens of both texts."""
    folder, _, tokenizer = write_run(tmp_path, has_generator)
    detector = opened(folder)
    assert (detector.generator is not None) == has_generator
    text = " ".join([TEXT] * 4)
    passage = detector.passage(text, share=0.3, seed=1)
    assert passage.is_corrupted and passage == detector.passage(text, share=0.3, seed=1)
    assert passage != detector.passage(text, share=0.3, seed=2)
    original = "".join(word.before + (word.original or word.text) for word in passage.words) + passage.after
    assert original == text
    replaced = [word for word in passage.words if word.is_replaced]
    assert len(text.split()) * 0.1 < len(replaced) <= mask_count(len(passage.words), 0.3)
    for word in replaced:
        assert tokenizer(word.text).input_ids != tokenizer(word.original).input_ids
    assert passage.counts.replaced == len(replaced)


def test_words_are_replaced_as_in_the_run(tmp_path):
    """References: a generator of temperature 1e-4 writes its likeliest token, or with disallow_correct its likeliest wrong one."""
    folder, model, tokenizer = write_run(tmp_path)
    ids = np.array(tokenizer(" ".join([TEXT] * 8), add_special_tokens=False)["input_ids"])
    path = folder / "generator" / "config.json"
    plain = json.loads(path.read_text())

    def detector(**draws):
        path.write_text(json.dumps({**plain, "replaced_by": draws}))
        return opened(folder)

    usual = detector().with_replaced(ids, 0.4, 3)
    assert np.array_equal(detector(sampling="multinomial").with_replaced(ids, 0.4, 3), usual)
    read = []
    for style in ("electra", "bert"):
        styled = detector(mask_style=style)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(styled, "_drawn", lambda masked, positions, originals: read.append(masked) or originals)
            assert np.array_equal(styled.with_replaced(ids, 0.4, 3), ids)
    # BERT's way writes another word at a tenth of the positions.
    n_others = [int(((masked != ids) & (masked != tokenizer.mask_token_id)).sum()) for masked in read]
    assert n_others[0] == 0 < n_others[1]
    assert not np.array_equal(detector(sampling="fp32_gumbel").with_replaced(ids, 0.4, 3), usual)
    positions = np.arange(0, len(ids), 3)
    cold = detector(temperature=1e-4)
    assert cold.length > len(ids) + 2
    rows = torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]])
    with torch.no_grad():
        logits = model.generator(rows).logits[0, 1 + positions]
    assert cold._drawn(ids, positions, ids[positions]).tolist() == logits.argmax(-1).tolist()
    # The likeliest token is called the original one, so the second likeliest is drawn.
    likeliest = logits.argmax(-1).numpy()
    found = detector(temperature=1e-4, disallow_correct=True)._drawn(ids, positions, likeliest)
    assert found.tolist() == logits.topk(2).indices[:, 1].tolist()
    never_right = detector(disallow_correct=True).with_replaced(ids, 0.4, 3)
    assert (never_right != ids).sum() == mask_count(len(ids), 0.4)


def test_a_measured_threshold_is_taken_and_a_given_one_wins(tmp_path):
    folder, _, _ = write_run(tmp_path, length=24, threshold=0.31)
    assert opened(folder).passage(TEXT).threshold == 0.31
    assert opened(folder / "discriminator").passage(TEXT, threshold=0.9).threshold == 0.9


def test_texts_without_a_word_and_bytes_that_are_no_text_are_refused(run):
    detector = opened(run[0])
    for text in ("", " \n ", "\x01"):
        with pytest.raises(UserError, match="no word"):
            detector.passage(text)
    with pytest.raises(UserError, match="not UTF-8"):
        detector.passage("caf\udce9")
    # All unknown, and nothing of it can be masked.
    assert not any(word.is_replaced for word in detector.passage("Ω Ω Ω", share=0.5).words)


# ------------------------------------------------------------------------------------------- what is refused


def refused(folder, match):
    with pytest.raises(UserError, match=match) as caught:
        opened(folder).passage(TEXT)
    assert str(caught.value).startswith("--model ") and "\n" not in str(caught.value)


def test_a_folder_without_the_discriminators_head_is_refused(run, tmp_path):
    """A generator, and an encoder that was fine-tuned: transformers would fill the head with random numbers."""
    folder, model, tokenizer = run
    refused(folder / "generator", r"4 weights of an ElectraForPreTraining are not in there, discriminator_predictions")
    tuned = ElectraForSequenceClassification.from_pretrained(folder / "discriminator")
    tuned.save_pretrained(tmp_path)
    save_wordpiece(tokenizer, tmp_path)
    why = "a fine-tuned encoder has lost the head of its pretraining, and one of another --objective has another head"
    refused(tmp_path, why)


def test_a_folder_without_some_of_the_encoders_weights_is_refused(run, tmp_path):
    shutil.copytree(run[0] / "discriminator", tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    weights = load_file(path)
    del weights["electra.encoder.layer.1.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    refused(tmp_path / "a", "1 weights of an ElectraForPreTraining are not in there, electra.encoder.layer.1")


def test_another_model_and_no_model_are_refused(tmp_path):
    refused(
        tmp_path / "nowhere",
        "no config.json there.* train_electra.py leaves such a folder as electra_small/discriminator",
    )
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json there")
    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "a model of the kind bert; a network of an ELECTRA is wanted")


@pytest.mark.parametrize("name", [".", "../discriminator", "..", "~/discriminator", "~"])
def test_a_folder_may_be_named_from_within_and_by_a_tilde(run, monkeypatch, name):
    monkeypatch.chdir(run[0] / "discriminator")
    monkeypatch.setenv("HOME", str(run[0]))
    assert opened(name).generator is not None


def test_damaged_weights_and_a_missing_vocabulary_are_told(run, tmp_path):
    shutil.copytree(run[0] / "discriminator", tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    weights = load_file(path)
    weights["discriminator_predictions.dense.bias"][:] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="its weights are damaged"):
        opened(tmp_path / "a").passage(TEXT)
    for name in ("tokenizer.json", "vocab.txt"):
        (tmp_path / "a" / name).unlink()
    with pytest.raises(UserError, match="no vocabulary is in there"):
        opened(tmp_path / "a")


def test_a_tokenizer_with_ids_beyond_the_embeddings_is_refused_with_what_detect_can_do(run, tmp_path):
    """detect.py has no flag for another tokenizer."""
    shutil.copytree(run[0] / "discriminator", tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    tokenizer.add_tokens(["beyond"])
    tokenizer.save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="copy the files of the tokenizer that it was trained with") as told:
        opened(tmp_path / "a")
    assert "--tokenizer_path" not in str(told.value)


def test_a_generator_of_other_sizes_is_refused(run, tmp_path):
    write_run(tmp_path)
    path = tmp_path / "generator" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(UserError, match="generator: a model of the kind bert"):
        opened(tmp_path)
    _, other, tokenizer = write_run(tmp_path / "other")
    other.generator.resize_token_embeddings(len(tokenizer) + 8)
    other.generator.save_pretrained(tmp_path / "generator")
    with pytest.raises(UserError, match="another vocab_size"):
        opened(tmp_path)
