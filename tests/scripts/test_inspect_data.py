"""scripts/inspect_data.py. References: planted copies and leaks, counts by hand, the batches of the loader."""

import html
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from common.errors import DataError, UserError
from common.wording import printable
from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.encoder import ChatEncoder
from dataset.corpus import Corpus
from dataset.loader import assemble
from dataset.planned_mixture import RunLength
from dataset.quality.copies import NONE
from dataset.reading.conversations import CONVERSATION
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from scripts import data_figures, inspect_data
from scripts.data_figures import DataLook
from scripts.data_rows import row_of, spans_of
from scripts.inspect_settings import parse_args
from tests.chats import ids_and_mask, write_chats
from tests.dataset.quality.planted import changed, chinese, english, jaccard
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT, SHARED, needs_shared


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A corpus of two files, English and Chinese, with 50 copies to the letter, 20 near ones and 5 leaked documents of 30."""
    folder = tmp_path_factory.mktemp("planted")
    generator = random.Random(0)
    texts = [english(generator) for _ in range(150)] + [chinese(generator) for _ in range(150)]
    validation = [english(generator) for _ in range(15)] + [chinese(generator) for _ in range(15)]
    leaked = generator.sample(range(30), 5)
    # One to the letter, the others within documents.
    with_leaks = [validation[leaked[0]]]
    for number in leaked[1:]:
        with_leaks.append(f"{english(generator)}\n{validation[number]}\n{chinese(generator)}")
    exact = generator.sample(texts, 50)
    near = [changed(text, generator, 0.8, 0.95) for text in generator.sample(texts, 20)]
    first = write(folder / "a.jsonl", texts + with_leaks)
    second = write(folder / "b.jsonl", exact + near)
    valid = write(folder / "valid.jsonl", validation)
    return folder, first, second, valid, leaked


def test_signatures_of_near_copies_lie_beside_the_store_and_not_in_the_folder_for_temporary_files(
    tmp_path, monkeypatch
):
    """A large corpus has gigabytes of them. Reference: --deduplicate near."""
    places = []

    def near_copies(texts, copies, scratch=None):
        places.append(scratch)
        list(texts)
        return copies

    monkeypatch.setattr(data_figures, "near_copies", near_copies)
    path = write(tmp_path / "a.jsonl", ["one text", "another text"])
    look_at("--data_path", path).figures()
    look_at("--data_path", path, "--cache_dir", tmp_path / "named").figures()
    assert places == [tmp_path / ".token_store", tmp_path / "named"]


def test_a_defect_keeps_its_traceback(tmp_path, monkeypatch):
    def defect(look):
        raise ValueError("of ours")

    monkeypatch.setattr(DataLook, "figures", defect)
    with pytest.raises(ValueError, match="of ours") as caught:
        inspect_data.main(["--data_path", write(tmp_path / "a.jsonl", ["one text"])])
    assert not isinstance(caught.value, UserError)


def look_at(*arguments):
    return DataLook(parse_args([*map(str, arguments), "--tokenizer_path", str(ROOT / "model")]))


def test_all_that_was_planted_is_found_and_nothing_else(planted):
    folder, first, second, valid, leaked = planted
    look = look_at("--data_path", first, second, "--val_path", valid)
    figures = look.figures()
    assert figures.copies.exact == 50
    assert 19 <= figures.copies.near <= 20
    assert (figures.copies.of[:305] == NONE).all()
    assert [(source.exact, source.near) for source in figures.sources] == [(0, 0), (50, figures.copies.near)]
    for leak in figures.leaks:
        assert (leak.documents, leak.leaked, leak.some, leak.too_short) == (30, 5, 5, 0)
    places = {
        example.place
        for example in look_at("--data_path", first, "--val_path", valid, "--examples", 9).figures().leaks[0].examples
    }
    assert places == {f"{valid}:{number + 1}" for number in leaked}


def test_counts_are_those_of_the_files(planted):
    """Reference: the texts and their ids, one by one."""
    folder, first, second, _, _ = planted
    look = look_at("--data_path", first, second, "--texts", 1)
    figures = look.figures()
    all_lengths = []
    for source, path in zip(figures.sources, (first, second), strict=True):
        with open(path, encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        lengths = [len(ids) for ids in look.encoder.encode(texts)]
        all_lengths += lengths
        n_bytes = sum(len(text.encode()) for text in texts)
        assert (source.name, source.documents, source.tokens, source.n_bytes) == (
            path,
            len(texts),
            sum(lengths),
            n_bytes,
        )
        assert source.bytes_per_token == pytest.approx(n_bytes / (sum(lengths) - 2 * len(texts)))
        assert (source.median, source.longest) == (int(np.median(lengths)), max(lengths))
    for bin in figures.lengths:
        inside = [length for length in all_lengths if bin.lowest <= length <= bin.highest]
        assert (bin.documents, bin.tokens) == (len(inside), sum(inside))
    assert sum(bin.documents for bin in figures.lengths) == len(all_lengths)
    assert {language.name for language in figures.languages} == {"Latin letters", "Chinese"}
    # Each source with a share of its own: the same figures.
    shares = look_at("--data_path", f"{first}:0.5", f"{second}:0.5").figures()
    assert shares.sources == figures.sources


@pytest.mark.parametrize("pack", [1, 0])
def test_a_row_is_what_the_loader_gives(planted, pack):
    """Reference: the batch. The texts of the spans are those of the documents."""
    folder, first, second, _, _ = planted
    look = look_at("--data_path", first, second, "--max_seq_len", 256, "--pack", pack)
    # The places of documents are known once the texts were read.
    look.figures()
    plan = look.corpus.plan(0)
    for number in (0, 1, plan.n_rows - 1):
        row = row_of(look, number)
        batch = assemble(look.corpus.store, plan, range(number, number + 1))
        trained = [token for piece in row.pieces for span in piece.spans if span.is_trained for token in span.tokens]
        assert trained == batch.targets[0][batch.targets[0] >= 0].tolist()
        assert f"{len(trained)} trained" in row.title
        for piece, (document, start, pairs) in zip(row.pieces, plan.pieces_of_row(number), strict=True):
            begin = int(look.corpus.store.offsets[document]) + start
            tokens = look.corpus.store.tokens[begin : begin + pairs + 1].tolist()
            assert [token for span in piece.spans for token in span.tokens] == tokens
            assert "".join(span.text for span in piece.spans) == look.tokenizer.decode(tokens)
            path, line = re.match(r"(.*):(\d+), ", piece.title).groups()
            with open(path, encoding="utf-8") as file:
                text = json.loads(file.read().splitlines()[int(line) - 1])["text"]
            assert look.encoder.encode([text])[0][start : start + pairs + 1] == tokens


def test_spans_are_whole_characters_and_the_text_of_all_tokens():
    tokenizer = small_tokenizer()
    text = "the cat, 中文 and 🦜"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    spans = spans_of(tokenizer, tokens, [False] + [True] * (len(tokens) - 1))
    assert "".join(span.text for span in spans) == text
    assert "🦜" in [span.text[-1] for span in spans] and not any("\ufffd" in span.text for span in spans)


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[31mred\x07",
    "</pre></body>&lt;b&gt;",
    "{{ 1 + 1 }}",
    "\u202egnp",
]


def test_hostile_texts_are_shown_as_texts(tmp_path, capsys):
    """On a terminal and on the page: no control character, no tag that is not the page's own."""
    path = write(tmp_path / "<b>a.jsonl", [f"{text} {i}" for i, text in enumerate(HOSTILE * 3)])
    page = tmp_path / "data.html"
    assert inspect_data.main(["--data_path", path, "--row", "0", "--out", str(page)]) == 0
    out = capsys.readouterr().out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    text = page.read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "<script" not in text and "<img" not in text and "<b>a" not in text and text.count("</body>") == 1
    # What is left without the page's own tags is the texts as they were written. All of them are in this row.
    without_tags = html.unescape(re.sub("<[^<>]*>", "", text))
    for hostile in HOSTILE:
        assert printable(hostile) in without_tags and printable(hostile) in out


def test_without_the_library_the_rest_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    path = write(tmp_path / "a.jsonl", ["one text", "one text", "another"])
    assert inspect_data.main(["--data_path", path]) == 0
    out = capsys.readouterr().out
    assert "pip install rensa" in out and "not looked for" in out and "1 (33.3%)" in out and "LANGUAGES" in out


def test_texts_are_not_read_if_that_is_asked_for(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", ["one text", "one text", "another"])
    assert inspect_data.main(["--data_path", path, "--texts", "0", "--row", "0"]) == 0
    out = capsys.readouterr().out
    assert "LANGUAGES" not in out and "1 (33.3%)" in out and "document 0 of" in out


def test_the_store_is_the_one_that_the_trainer_opens(tmp_path):
    path = write(tmp_path / "a.jsonl", ["one text", "another"])
    look = look_at("--data_path", path)
    assert [store.folder for store in look.stores] == [store.folder for store in look.corpus.stores]
    assert len(list((tmp_path / ".token_store").glob("a-*/"))) == 1


def test_rows_are_those_of_a_run_without_copies_if_it_leaves_them_out(tmp_path):
    path = write(tmp_path / "a.jsonl", ["one text", "one text", "another"])
    look = look_at("--data_path", path, "--deduplicate", "exact")
    assert look.figures().copies.exact == 1
    assert len(row_of(look, 0).pieces) == 2


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("pack", [1, 0])
def test_of_conversations_a_row_shows_what_is_trained(tmp_path, pack):
    """Reference: the chat template, read plainly."""
    path = write_chats(tmp_path / "chats.jsonl", 20)
    look = look_at("--data_path", path, "--max_seq_len", 64, "--pack", pack)
    # The places of conversations are known once they were read.
    figures = look.figures()
    plan = look.corpus.plan(0)
    seen = 0
    for number in range(plan.n_rows):
        for piece in row_of(look, number).pieces:
            line = int(re.match(r".*chats.jsonl:(\d+), ", piece.title)[1])
            ids, mask = ids_and_mask(look.tokenizer, {"messages": lines_of(path)[line - 1]["conversations"]})
            tokens = [token for span in piece.spans for token in span.tokens]
            trained = [span.is_trained for span in piece.spans for _ in span.tokens]
            assert (tokens, trained) == (ids[: len(tokens)], mask[: len(tokens)])
            assert f"{sum(trained)} token" in piece.title
            assert "".join(span.text for span in piece.spans) == look.tokenizer.decode(tokens)
            seen += sum(trained)
    (source,) = figures.sources
    assert seen == source.answers == plan.row_targets(0, plan.n_rows)
    said = sum(len("\n".join(turn["content"] for turn in line["conversations"])) for line in lines_of(path))
    assert (source.documents, source.n_bytes) == (20, said)


def test_conversations_are_told_by_the_first_line_or_the_flag(tmp_path, capsys):
    path = write_chats(tmp_path / "chats.jsonl", 5)
    assert inspect_data.main(["--data_path", str(path), "--row", "0", "--epochs", "2", "--text_field", "a"]) == 0
    out = capsys.readouterr().out
    assert "the data holds conversations" in out and "tokens of answers" in out
    assert "⟦<|im_start|>user\n" in out and "⟦⟧" not in out and "⟧⟦" not in out
    assert "--epochs 2 has no effect" in out and "--text_field a has no effect: conversations are read" in out
    # As the trainer opens it.
    encoder = ChatEncoder(load_tokenizer(ROOT / "model"))
    corpus = ChatCorpus([str(path)], encoder, max_seq_len=512, seed=42, text_field=CONVERSATION, progress=False)
    assert [store.folder for store in look_at("--data_path", path).stores] == [store.folder for store in corpus.stores]
    with pytest.raises(DataError, match="no 'text' in the object"):
        inspect_data.main(["--data_path", str(path), "--conversations", "0"])
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps({"text": "the text", **lines_of(path)[0]}))
    assert not look_at("--data_path", both).is_chat
    assert look_at("--data_path", both, "--conversations", 1).is_chat
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(DataError, match="a.txt: conversations are read from .jsonl"):
        look_at("--data_path", path, tmp_path / "a.txt")


@pytest.mark.parametrize("length", [RunLength(1), RunLength(3), RunLength(updates=9, rows_of_update=6)])
def test_where_shares_change_rows_are_those_of_the_run(tmp_path, capsys, length):
    """Reference: what the trainer makes of a run of that length."""
    paths = []
    for i, name in enumerate("ab"):
        texts = [f"{name} {number} " + "word " * (5 * i + number % 7) for number in range(30)]
        paths.append(write(tmp_path / f"{name}.jsonl", texts))
    sources = [f"{paths[0]}:0.8..0.2", f"{paths[1]}:0.2..0.8"]
    flags = ["--data_path", *sources, "--max_seq_len", "32"]
    if length.updates:
        flags += ["--max_updates", "9", "--batch_size", "3", "--accumulation_steps", "2"]
    else:
        flags += ["--epochs", str(length.epochs)]
    look = look_at(*flags, "--row", 0)
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    expected = Corpus(sources, encoder, max_seq_len=32, seed=42, length=length, progress=False).plan(0)
    found = look.corpus.plan(0)
    assert found.n_rows == expected.n_rows
    assert all(found.pieces_of_row(row) == expected.pieces_of_row(row) for row in range(found.n_rows))
    told = f"{length.epochs} epoch" if not length.updates else "9 updates of 6 rows"
    (line,) = [line for line in look.notices if line.startswith(f"rows of a run of {told}")]
    assert row_of(look, found.n_rows - 1).pieces
    with pytest.raises(UserError, match=f"--row {found.n_rows}: the run has {found.n_rows} rows, counted from 0"):
        inspect_data.main([*flags, "--row", str(found.n_rows)])


def test_a_run_that_asks_for_too_much_is_told(tmp_path):
    """A little too much is shown all the same; far too much ends at once, and not after all its rows are laid out."""
    paths = [write(tmp_path / f"{name}.jsonl", [f"{name} {number} word word" for number in range(30)]) for name in "ab"]
    flags = ["--data_path", f"{paths[0]}:0.8..0.2", f"{paths[1]}:0.2..0.8", "--max_seq_len", "32", "--batch_size", "4"]
    look = look_at(*flags, "--accumulation_steps", "1", "--max_updates", "20")
    (line,) = [line for line in look.notices if line.startswith("warning: a trainer refuses these rows: --data_path: ")]
    assert "too little text for 20 updates" in line and "times where 1 may be" in line
    start = time.perf_counter()
    with pytest.raises(DataError, match="too little text for 100,000,000 updates: "):
        look_at(*flags, "--max_updates", "100000000")
    assert time.perf_counter() - start < 10


def places_of_rows(look):
    """{what the title of a piece says of its place: how often}"""
    # It reads the texts, by which the places are known.
    look.figures()
    places = Counter()
    for row in range(look.corpus.plan(0).n_rows):
        for piece in row_of(look, row).pieces:
            places[piece.title.split(",")[0].rpartition("/")[2]] += 1
    return places


def test_a_copy_in_a_row_has_its_own_place(tmp_path):
    """Reference: each line of the files stands in one row. With --deduplicate the first of equal lines does."""
    same = "the same text three times over"
    first = write(tmp_path / "a.jsonl", ["one", same, same])
    second = write(tmp_path / "b.jsonl", [same, "two", "one"])
    flags = ["--data_path", first, second, "--max_seq_len", "16"]
    look = look_at(*flags)
    assert places_of_rows(look) == {f"{name}.jsonl:{line}": 1 for name in "ab" for line in (1, 2, 3)}
    look = look_at(*flags, "--deduplicate", "exact")
    assert places_of_rows(look) == {"a.jsonl:1": 1, "a.jsonl:2": 1, "b.jsonl:2": 1}


def test_what_can_be_mended_is_a_line(tmp_path):
    path = write(tmp_path / "a.jsonl", ["one text"])
    for arguments, message in (
        (["--row", "7"], "--row 7: the first epoch has 1 row, counted from 0"),
        (["--out", "page.txt"], "ends in .html"),
        (["--out", str(tmp_path / "no" / "page.html")], "cannot be written"),
        (["--val_path", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--tokenizer_path", str(tmp_path)], "no tokenizer can be loaded"),
    ):
        with pytest.raises((UserError, DataError), match=message):
            inspect_data.main(["--data_path", path, *arguments])


@pytest.mark.slow
def test_the_command_ends_well_by_path(tmp_path):
    path = write(tmp_path / "a.jsonl", ["one text", "another"])
    command = [sys.executable, str(ROOT / "scripts" / "inspect_data.py"), "--data_path", path]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert ended.returncode == 0 and ended.stderr == "" and "LENGTHS" in ended.stdout


@needs_shared
@pytest.mark.slow
def test_what_is_planted_in_real_text_is_found(tmp_path):
    """In 6 MB of English and Chinese: 50 copies, 20 near ones, 5 of the validation documents."""
    generator = random.Random(4)
    texts = []
    validation = []
    for name in ("en_wiki", "zh_wiki"):
        with open(SHARED / "corpora" / f"{name}.train.jsonl", encoding="utf-8") as file:
            texts += [json.loads(line)["text"] for line, _ in zip(file, range(1500), strict=False)]
        with open(SHARED / "corpora" / f"{name}.valid.jsonl", encoding="utf-8") as file:
            validation += [json.loads(line)["text"] for line in file]
    options = ["--val_path", write(tmp_path / "valid.jsonl", validation)]
    before = look_at("--data_path", write(tmp_path / "clean.jsonl", texts), *options).figures()
    usual = [text for text in texts if 300 < len(text) < 20_000]
    near = [changed(text, generator, 0.8, 0.9) for text in generator.sample(usual, 20)]
    leaked = [f"{english(generator)}\n{text}" for text in generator.sample(validation, 5)]
    planted = [*texts, *generator.sample(texts, 50), *near, *leaked]
    after = look_at("--data_path", write(tmp_path / "planted.jsonl", planted), *options).figures()
    assert after.copies.exact - before.copies.exact == 50
    assert after.copies.near - before.copies.near >= 19
    assert after.leaks[0].leaked - before.leaks[0].leaked == 5
    # What is told of the clean text is near by the sets too.
    for number in np.flatnonzero(before.copies.of != NONE):
        assert jaccard(texts[before.copies.of[number]], texts[number]) > 0.65
