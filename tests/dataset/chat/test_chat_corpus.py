"""Rows of conversations. References: the mask of each conversation by itself, and rows that are not packed."""

import json

import numpy as np
import pytest
import torch

from common.errors import DataError
from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.encoder import ChatEncoder
from dataset.loader import IGNORE
from dataset.reading.conversations import CONVERSATION
from dataset.tokenizing.encoder import load_tokenizer
from tests.chats import ids_and_mask, turn, write_chats
from tests.helpers import ROOT, tiny_model

TOKENIZER = load_tokenizer(ROOT / "model")
ENCODER = ChatEncoder(TOKENIZER)


def corpus_of(*paths, max_seq_len=64, **options):
    options = {"seed": 3, "text_field": CONVERSATION, "progress": False, **options}
    return ChatCorpus([str(path) for path in paths], ENCODER, max_seq_len=max_seq_len, **options)


def whole_epoch(corpus):
    plan = corpus.plan(0)
    return plan, corpus.assembler(0)[plan.recipe(range(plan.n_rows))]


def trained_tokens(path, most):
    """Each conversation's trained ids, of its first `most`, as a sorted list."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        ids, mask = ids_and_mask(TOKENIZER, {"messages": json.loads(line)["conversations"]})
        trained = [token for token, is_trained in zip(ids[:most], mask[:most], strict=True) if is_trained]
        found.append(trained)
    return sorted(trained for trained in found if trained)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("max_seq_len", [16, 24, 40, 512])
def test_rows_train_each_answer_once_and_nothing_else(tmp_path, pack, max_seq_len):
    path = write_chats(tmp_path / "a.jsonl", 60)
    corpus = corpus_of(path, max_seq_len=max_seq_len, pack=pack)
    plan, batch = whole_epoch(corpus)
    found = []
    for targets, documents in zip(batch.targets, batch.document_ids, strict=True):
        for number in range(int(documents.max()) + 1):
            of_document = targets[documents == number]
            found.append(of_document[of_document != IGNORE].tolist())
    assert sorted(found) == trained_tokens(path, max_seq_len)
    # What the plan has told of each row beforehand
    for row in range(plan.n_rows):
        assert plan.totals(row, row + 1).targets == int((batch.targets[row] != IGNORE).sum())
    assert batch.n_targets == plan.totals(0, plan.n_rows).targets
    assert plan.fill == plan.n_pairs / (plan.n_rows * plan.T) > batch.n_targets / (plan.n_rows * plan.T)


def test_packed_rows_give_the_loss_and_the_gradient_of_padded_ones(tmp_path):
    path = write_chats(tmp_path / "a.jsonl", 30)
    results = []
    for pack in (True, False):
        _, batch = whole_epoch(corpus_of(path, pack=pack))
        model = tiny_model(vocab_size=len(TOKENIZER)).double()
        loss, _ = model.training_losses(batch.input_ids, batch.targets, batch.document_ids, batch.position_ids)
        loss = loss / batch.n_targets
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for packed, padded in zip(*results, strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-6, rtol=1e-6)


def test_validation_without_an_answer_within_a_row_is_refused(tmp_path):
    """Its loss would be the mean of nothing."""
    path = write_chats(tmp_path / "a.jsonl", 10)
    valid = tmp_path / "valid.jsonl"
    valid.write_text(json.dumps({"messages": [turn("user", "word " * 100), turn("assistant", "Yes")]}))
    options = {"val_path": str(valid)}
    with pytest.raises(DataError, match="--val_path .*valid.jsonl: no answer begins within --max_seq_len, so its loss"):
        corpus_of(path, max_seq_len=64, **options)
    corpus = corpus_of(path, max_seq_len=512, **options)
    assert corpus.validation()[0].n_targets > 0


def test_conversations_that_are_too_long_are_cut_counted_and_told(tmp_path):
    path = tmp_path / "a.jsonl"
    short = [turn("user", "Hi"), turn("assistant", "Yes")]
    cut = [turn("user", "Hi"), turn("assistant", "word " * 100)]
    without = [turn("user", "word " * 100), turn("assistant", "Yes")]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in (short, cut, without)))
    corpus = corpus_of(path, max_seq_len=32)
    plan, batch = whole_epoch(corpus)
    assert sorted(plan.documents_of(0, plan.n_rows)) == [0, 1]
    lost = 0
    for turns in (cut, without):
        _, mask = ids_and_mask(TOKENIZER, {"messages": turns})
        lost += sum(mask[32:])
    (line,) = corpus.cut_off_report(plan)
    assert line.startswith("note: 2 of 3 conversations are longer than --max_seq_len 32")
    assert f"{lost} tokens of answers are not trained; nothing is trained of 1 conversation whose answers" in line
    path.write_text(json.dumps({"messages": cut}) + "\n")
    (line,) = corpus_of(path, max_seq_len=32).cut_off_report(plan)
    assert line.startswith("note: 1 of 1 conversation is longer than --max_seq_len 32 and is cut there; ")
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in (short, cut, without)))
    assert corpus_of(path, max_seq_len=512).cut_off_report(plan) == []
    with pytest.raises(DataError, match="no answer begins within --max_seq_len"):
        corpus_of(path, max_seq_len=4).plan(0)


@pytest.mark.parametrize("pack", [True, False])
def test_answers_that_say_nothing_or_have_no_weight_are_read_and_told(tmp_path, pack):
    """References: the plain reading of the template, and the same conversations without weights."""
    path = tmp_path / "a.jsonl"
    asked = turn("user", "Hi")
    conversations = [
        [asked, turn("assistant", ""), asked, turn("assistant", "Yes")],
        [asked, turn("assistant", "No", weight=0), asked, turn("assistant", "Yes", weight=1)],
        [asked, turn("assistant", " \n"), asked, turn("assistant", "b")],
    ]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
    corpus = corpus_of(path, pack=pack)
    plan, batch = whole_epoch(corpus)
    found = []
    for inputs, targets, documents in zip(batch.input_ids, batch.targets, batch.document_ids, strict=True):
        for number in range(int(documents.max()) + 1):
            own = documents == number
            found.append((inputs[own].tolist(), (targets[own] != IGNORE).tolist(), targets[own].tolist()))
    wanted = []
    for turns in conversations:
        ids, mask = ids_and_mask(TOKENIZER, {"messages": turns})
        targets = [token if is_trained else IGNORE for token, is_trained in zip(ids, mask, strict=True)]
        wanted.append((ids[:-1], mask[1:], targets[1:]))
    assert sorted(found) == sorted(wanted)
    assert batch.n_targets == plan.totals(0, plan.n_rows).targets == sum(sum(mask) for _, mask, _ in wanted)
    assert corpus.notices == ["note: 3 answers of weight 0, or in which nothing is said, are read and not trained"]
    plain = write_chats(tmp_path / "b.jsonl", 3)
    assert corpus_of(plain).notices == []
    path.write_text(json.dumps({"messages": conversations[0]}) + "\n")
    assert corpus_of(path).notices == [
        "note: 1 answer of weight 0, or in which nothing is said, is read and not trained"
    ]


def test_validation_has_the_answers_of_the_conversations_that_are_held_out(tmp_path):
    path = write_chats(tmp_path / "a.jsonl", 60)
    corpus = corpus_of(path, val_fraction=0.3)
    validation = corpus.validation()
    held_out = [validation[i] for i in range(len(validation))]
    _, trained = whole_epoch(corpus)
    total = sum(batch.n_targets for batch in held_out) + trained.n_targets
    assert total == sum(map(len, trained_tokens(path, 64))) and held_out[0].n_targets > 0
    assert sum(int((batch.targets != IGNORE).sum()) for batch in held_out) == sum(b.n_targets for b in held_out)


@pytest.mark.parametrize("shares", [("0.75", "0.25"), ("0.9..0.6", "0.1..0.4"), ("0.75", "0.25:x2")])
def test_a_share_counts_the_tokens_of_answers(tmp_path, shares):
    """Answers are a larger part of the one file than of the other. Reference: the targets of the batches."""
    a, b = write_chats(tmp_path / "a.jsonl", 300), tmp_path / "b.jsonl"
    with open(b, "w", encoding="utf-8") as file:
        for number in range(300):
            turns = [turn("user", f"{number} and so on?"), turn("assistant", "one two three four five six seven")]
            file.write(json.dumps({"messages": turns}) + "\n")
    corpus = corpus_of(f"{a}:{shares[0]}", f"{b}:{shares[1]}")
    plan = corpus.plan(0)
    trained = [0, 0]
    for row in range(plan.n_rows):
        batch = corpus.assembler(0)[plan.recipe([row])]
        _, documents, _, _ = plan.pieces([row])
        for number, document in enumerate(documents):
            of_document = batch.targets[batch.document_ids == number]
            trained[int(document >= 300)] += int((of_document != IGNORE).sum())
    assert sum(trained) == plan.totals(0, plan.n_rows).targets
    assert trained[0] / sum(trained) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("shares", [("0.75", "0.25"), ("0.9..0.6", "0.1..0.4")])
def test_what_was_trained_within_an_epoch_counts_answers(tmp_path, shares):
    """References: the targets of the rows; the fill of rows, which has the questions too."""
    a, b = write_chats(tmp_path / "a.jsonl", 100), write_chats(tmp_path / "b.jsonl", 100, seed=1)
    corpus = corpus_of(f"{a}:{shares[0]}", f"{b}:{shares[1]}")
    plan = corpus.plan(0)
    for row in (1, plan.n_rows // 2, plan.n_rows - 1):
        told = corpus.trained(0, row)
        assert sum(tokens for _, tokens, _ in told) == plan.row_targets(0, row)
    _, _, _, pairs = plan.pieces(range(plan.n_rows))
    assert plan.fill == pytest.approx(int(pairs.sum()) / (plan.n_rows * plan.T), rel=0.05)


def test_short_questions_that_differ_are_no_near_duplicates(tmp_path):
    """What all lines have in common, names of roles and fields, is longer than they are."""
    pytest.importorskip("rensa")
    path = tmp_path / "sums.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for number in range(20):
            turns = [turn("user", f"2+{number}?"), turn("assistant", str(2 + number))]
            file.write(json.dumps({"messages": turns}) + "\n")
    assert len(corpus_of(path, deduplicate="near").store) == 20


def test_several_files_are_one_corpus(tmp_path):
    write_chats(tmp_path / "a.jsonl", 60)
    write_chats(tmp_path / "b.jsonl", 60, seed=1)
    assert len(corpus_of(tmp_path / "*.jsonl").store) == 120 == len(corpus_of(tmp_path).store)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.parquet"])
def test_other_kinds_of_files_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text("a")
    with pytest.raises(DataError, match="conversations are read from .jsonl, .ndjson and .json files"):
        corpus_of(path)
    with pytest.raises(DataError, match="conversations are read from"):
        corpus_of(write_chats(tmp_path / "b.jsonl", 3), val_path=str(path))


@pytest.mark.slow
def test_several_processes_tokenise_to_the_same_store(tmp_path, monkeypatch):
    """The worker processes render templates, too."""
    path = write_chats(tmp_path / "a.jsonl", 200)
    alone = corpus_of(path, cache_dir=str(tmp_path / "one"), num_procs=1)
    monkeypatch.setattr("dataset.store.builder.BLOCK_BYTES", 4096)
    divided = corpus_of(path, cache_dir=str(tmp_path / "two"), num_procs=2)
    assert np.array_equal(alone.store.tokens, divided.store.tokens)
    assert np.array_equal(alone.store.offsets, divided.store.offsets)
