"""ELECTRA's examples. References: the documents themselves (a ledger of tokens), a plain loop over lines, brute force."""

import json
import random

import numpy as np
import pytest

from common.errors import DataError
from dataset.batches import UpdateSchedule
from dataset.packing import all_documents
from dataset.store.build import open_or_build
from dataset.tokenizing.wordpiece import save_wordpiece
from encoders.electra.examples import ElectraAssembler, ElectraPlan, Examples, LineEncoder
from encoders.vocabulary import load_wordpiece
from model.config import IGNORE
from tests.helpers import ROOT, SHARED, WORDS, batches_of, command_line, needs_shared, steps_of, write_texts

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_vocab(path, tokens=(*SPECIALS, *WORDS, *"bcdefghijklmnopqrstuvwxyz", ".")):
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def write_lines(path, n_documents=30, seed=0):
    """Documents of 1 to 12 lines of 1 to 30 words; returns (path, documents as lists of lists of words)."""
    generator = random.Random(seed)
    documents = []
    for _ in range(n_documents):
        n_lines = generator.randint(1, 12)
        documents.append([generator.choices(WORDS, k=generator.randint(1, 30)) for _ in range(n_lines)])
    write_texts(path, ["\n".join(map(" ".join, document)) for document in documents])
    return path, documents


def store_of(path):
    """(tokenizer, encoder, store) of a file."""
    tokenizer = load_wordpiece(write_vocab(path.with_name("vocab.txt")))
    encoder = LineEncoder(tokenizer)
    return tokenizer, encoder, open_or_build(str(path), encoder, progress=False)


@pytest.fixture
def opened(tmp_path):
    """(tokenizer, encoder, store, documents)"""
    path, documents = write_lines(tmp_path / "lines.jsonl")
    return *store_of(path), documents


@pytest.mark.parametrize("max_seq_len", [5, 12, 32, 128])
def test_every_token_is_in_exactly_one_example_and_none_spans_two_documents(opened, max_seq_len):
    tokenizer, encoder, store, documents = opened
    examples = Examples(store, max_seq_len, encoder.sep_id, 1, -1, all_documents(store))
    text = {n: [tokenizer.convert_tokens_to_ids(w) for line in d for w in line] for n, d in enumerate(documents)}
    seen = {n: [] for n in text}
    plan = ElectraPlan(examples, 0.15, 1, 0)
    assembler = ElectraAssembler(store, tokenizer, max_seq_len, 0.15, "electra", 1)
    rows = np.argsort(examples.begin[plan._order])  # in the order of the text
    batch = assembler[plan.recipe(rows)]
    for r, row in enumerate(rows.tolist()):
        (document,) = plan.documents_of(row, row + 1)
        n, ids = int(batch.lengths[r]), batch.ids[r].tolist()
        assert n <= max_seq_len and ids[0] == tokenizer.cls_token_id and ids[n - 1] == tokenizer.sep_token_id
        assert ids[n:] == [tokenizer.pad_token_id] * (max_seq_len - n)
        seps = [i for i in range(n) if ids[i] == tokenizer.sep_token_id]
        assert len(seps) in (1, 2)
        types = [0] * (seps[0] + 1) + [1] * (n - seps[0] - 1)
        assert batch.token_type_ids[r].tolist() == types + [0] * (max_seq_len - n)
        seen[document] += [i for i in ids[1:n] if i != tokenizer.sep_token_id]
    assert seen == text


def test_examples_are_those_of_a_plain_loop_over_lines(opened, monkeypatch):
    """Reference: gather lines to the target, cut at (target - 3)//2, carry the rest over; without the random choices."""
    tokenizer, encoder, store, documents = opened
    for name in ("SINGLE_SEGMENT", "RANDOM_TARGET", "OVERFLOW"):
        monkeypatch.setattr(f"encoders.electra.examples.{name}", 0.0)
    T, expected = 24, []
    for document in documents:
        lines = [len(line) for line in document]
        while lines:
            gathered = []
            while lines and sum(gathered) < T:
                gathered.append(lines.pop(0))
            first = gathered[0]
            rest = gathered[1:]
            while rest and first + rest[0] < (T - 3) // 2:
                first += rest.pop(0)
            a = min(first, T - 2)
            b = min(sum(rest), max(T - 3 - a, 0))
            expected.append((a, b))
            left = sum(gathered) - a - b  # the end of the last lines that were gathered
            carried = []
            for length in reversed(gathered):
                if left > 0:
                    carried.insert(0, min(left, length))
                    left -= length
            lines = carried + lines
    examples = Examples(store, T, encoder.sep_id, 1, -1, all_documents(store))
    assert list(zip(examples.first.tolist(), examples.second.tolist(), strict=True)) == expected


def test_the_random_choices_have_their_shares(tmp_path):
    """One-segment examples, random targets and overflowing first segments, counted over 30,000 short lines."""
    write_texts(tmp_path / "data.jsonl", ["\n".join(["the cat sat on a mat a"] * 1500)] * 20)
    _, encoder, store = store_of(tmp_path / "data.jsonl")
    examples = Examples(store, 128, encoder.sep_id, 3, -1, all_documents(store))
    full = examples.lengths >= 127
    assert np.mean(~full) == pytest.approx(0.05, abs=0.02)
    assert np.mean(examples.second[full] == 0) == pytest.approx(0.1, abs=0.03)
    pairs = examples.first[full & (examples.second > 0)]
    assert np.mean(pairs >= 62) == pytest.approx(0.5, abs=0.05)


def test_a_text_file_has_a_document_between_blank_lines(tmp_path):
    """And the spelling of a special token is text: it ends no line and stands for no masked position."""
    vocabulary = write_vocab(tmp_path / "vocab.txt", [*SPECIALS, "[", "]", "sep", "mask", *WORDS])
    encoder = LineEncoder(load_wordpiece(vocabulary))
    (tmp_path / "data.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\nsat [SEP]\r\n\r\n  \r\na [MASK]\n\n\ndogs ran")
    store = open_or_build(str(tmp_path / "data.txt"), encoder, progress=False)
    ids = [store.tokens[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)]
    texts = [" ".join(load_wordpiece(vocabulary).convert_ids_to_tokens(document)) for document in ids]
    assert texts == ["the cat [SEP] sat [ sep ] [SEP]", "a [ mask ] [SEP]", "dogs ran [SEP]"]
    (tmp_path / "nothing.jsonl").write_text('{"text": "\\n"}\n')
    with pytest.raises(DataError, match="nothing.jsonl: no document"):
        open_or_build(str(tmp_path / "nothing.jsonl"), encoder, progress=False)


def batches(opened, epoch, world_size=1, batch_size=6, workers=0, start_row=0, style="electra"):
    """{row of the epoch: its tensors} over all ranks."""
    tokenizer, encoder, store, _ = opened
    plan = ElectraPlan(Examples(store, 32, encoder.sep_id, 1, -1, all_documents(store)), 0.15, 1, epoch)
    assembler = ElectraAssembler(store, tokenizer, 32, 0.15, style, 1)
    schedule, found = UpdateSchedule(plan.n_rows, 2 * batch_size * world_size, batch_size, world_size, start_row), {}
    for rank in range(world_size):
        steps = zip(steps_of(schedule, rank), batches_of(assembler, plan, schedule, rank, workers), strict=True)
        for (_, _, lo, hi), (*_, batch) in steps:
            found |= {row: [part[row - lo].tolist() for part in batch] for row in range(lo, hi)}
    return found


def test_batches_depend_on_seed_epoch_and_row_alone(opened):
    first, second = batches(opened, 0), batches(opened, 1)
    assert first == batches(opened, 0, world_size=2, batch_size=3, workers=1)
    assert {row: b for row, b in first.items() if row >= 12} == batches(opened, 0, start_row=12)
    by_text = [{json.dumps(b[0]): b[1] for b in epoch.values()} for epoch in (first, second)]
    assert by_text[0].keys() == by_text[1].keys() and [b[0] for b in first.values()] != [b[0] for b in second.values()]
    same = sum(by_text[0][text] == by_text[1][text] for text in by_text[0])
    assert same < len(first) / 2  # very short examples have few choices


def test_totals_are_what_the_batches_hold(tmp_path):
    """A text with many unknown words, which are not masked."""
    texts = [" ".join("cat" if (i * j) % 7 < 3 else "\u6c34" for j in range(30)) for i in range(50)]
    write_texts(tmp_path / "data.jsonl", texts)
    tokenizer, encoder, store = store_of(tmp_path / "data.jsonl")
    plan = ElectraPlan(Examples(store, 16, encoder.sep_id, 1, tokenizer.unk_token_id, all_documents(store)), 0.5, 1, 0)
    for lo, hi in ((0, 7), (7, plan.n_rows)):
        batch = ElectraAssembler(store, tokenizer, 16, 0.5, "electra", 1)[plan.recipe(range(lo, hi))]
        assert plan.totals(lo, hi) == (int(batch.lengths.sum()), int((batch.labels != IGNORE).sum()))
        assert {*batch.labels[batch.labels != IGNORE].tolist()} <= {tokenizer.convert_tokens_to_ids("cat")}
    assert plan.totals(0, plan.n_rows).masked > 0


@needs_shared
def test_the_standard_vocabulary(tmp_path):
    path = SHARED / "tokenizers" / "bert-base-uncased-vocab.txt"
    tokenizer = load_wordpiece(path)
    assert len(tokenizer) == 30_522
    ids = LineEncoder(tokenizer).encode(["Café noir!"])[0]
    assert tokenizer.convert_ids_to_tokens(ids) == ["cafe", "noir", "!", "[SEP]"]
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[100], lines[101] = lines[101], lines[100]
    with pytest.raises(ValueError, match="unk is id 101, in the standard vocabulary of this size 100"):
        load_wordpiece(write_vocab(tmp_path / "swapped.txt", lines))


@pytest.mark.slow
def test_a_trained_vocabulary_is_never_too_large_and_always_the_same(tmp_path):
    """Many characters of equal frequency, trained in processes of their own; the commonest characters come first."""
    texts = ["".join(chr(0x4E00 + (7 * i + j) % 3000) for j in range(40)) + " the cat" * 9 for i in range(2000)]
    data = write_texts(tmp_path / "data.jsonl", texts)
    command = ["--type", "wordpiece", "--vocab_size", 300, "--data_path", data, "--out_dir"]
    script = ROOT / "trainer" / "train_tokenizer.py"
    for name in "01":
        ended = command_line([*command, tmp_path / name], script=script, PYTHONHASHSEED=name)
        assert ended.returncode == 0, ended.stderr
    first, second = ((tmp_path / name / "vocab.txt").read_text() for name in "01")
    lines = first.splitlines()
    assert first == second and len(lines) <= 300 and lines[:5] == SPECIALS and len(set(lines)) == len(lines)
    pieces = [load_wordpiece(tmp_path / place).tokenize("the cat") for place in ("0", "0/vocab.txt")]
    assert pieces[0] == pieces[1]


def test_faults_of_a_vocabulary_are_told_with_its_path(tmp_path):
    save_wordpiece(load_wordpiece(write_vocab(tmp_path / "vocab.txt")), tmp_path / "gaps")
    path = tmp_path / "gaps" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["cat"] = 40_000
    path.write_text(json.dumps(content))
    (tmp_path / "latin.txt").write_text("\n".join([*SPECIALS, "é"]), encoding="latin-1")
    for place, message in {
        tmp_path / "gaps": "ids of this tokenizer have gaps",
        path: r"no \[PAD\] in it",
        write_vocab(tmp_path / "twice.txt", [*SPECIALS, "the", "cat", "the"]): "is a line there twice",
        tmp_path / "latin.txt": "is in UTF-8, and this file is not",
    }.items():
        with pytest.raises(ValueError, match=f"{place}: .*{message}"):
            load_wordpiece(place)


def test_case_and_the_mark_that_windows_writes(tmp_path):
    path = write_vocab(tmp_path / "vocab.txt", [*SPECIALS, "The", "the"])
    assert [load_wordpiece(path, lower).tokenize("The") for lower in (True, False)] == [["the"], ["The"]]
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_wordpiece(marked).get_vocab() == load_wordpiece(path).get_vocab()
