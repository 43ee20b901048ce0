"""scripts/inspect_data.py. References: planted copies, counts by hand, the batches of the loader."""

import re
from collections import Counter

import numpy as np
import pytest

from common.errors import DataError, UserError
from common.wording import printable
from dataset.batches import Assembler
from scripts import inspect_data
from scripts.inspect_data import DataLook, InspectSettings, Piece, text_of_piece
from tests.chats import ids_and_mask, write_chats
from tests.dataset.quality.planted import planted
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT, records, train, write_texts

HOSTILE = ["<script>alert(1)</script>", "\x1b[31mred\x07", "\u202egnp"]


@pytest.fixture(scope="module")
def two_files(tmp_path_factory):
    """The second has copies of the texts of the first, 50 to the letter and 20 near ones."""
    folder, (unlike, exact, near) = tmp_path_factory.mktemp("planted"), planted(150, 50, 20, lowest=0.8)
    return write_texts(folder / "a.jsonl", unlike), write_texts(folder / "b.jsonl", exact + near)


def look_at(*arguments):
    return DataLook(InspectSettings.parse([*map(str, arguments), "--tokenizer_path", str(ROOT / "model")]))


def test_all_that_was_planted_is_found_and_nothing_else(two_files):
    first, second = two_files
    sections = {section.title: section for section in look_at("--data_path", first, second).sections()}
    of_first, of_second = sections["Copies of earlier documents"].rows
    assert of_first == [first, "0", "0", "0"] and of_second[1].startswith("50 ")
    assert 19 <= int(of_second[2].split()[0]) <= 20


def test_repeated_paragraphs_of_one_text_joined_of_many_are_counted(tmp_path):
    """Ten of forty paragraphs come again, two of them twice; short ones do not count. Without blank lines each line is one."""
    paragraphs = [f"Paragraph {number} tells\nsomething of its own." for number in range(40)]
    for end in ("\n\n", "\n \n\n"):
        (tmp_path / "a.txt").write_text(end.join([*paragraphs, "Yes.", "Yes.", *paragraphs[:10], *paragraphs[5:7]]))
        ((_, exact, _, repeated),) = look_at("--data_path", tmp_path / "a.txt").sections()[2].rows
        assert (exact, repeated) == ("0", "12 (23.1%)")
    (tmp_path / "b.txt").write_text("\n".join([f"A line of its own, the {number}th" for number in range(9)] * 2))
    assert look_at("--data_path", tmp_path / "b.txt").sections()[2].rows[0][3] == "9 (50.0%)"


def test_counts_are_those_of_the_files(two_files):
    first, second = two_files
    look = look_at("--data_path", first, second)
    sources, lengths, *_ = look.sections()
    all_lengths = []
    for row, path in zip(sources.rows, (first, second), strict=True):
        texts = [record["text"] for record in records(path, None)]
        found = [len(ids) for ids in look.encoder.encode(texts)]
        all_lengths += found
        n_bytes = sum(len(text.encode()) for text in texts)
        per_token = n_bytes / (sum(found) - 2 * len(texts))
        wanted = [path, f"{len(texts):,}", f"{sum(found):,}", f"{n_bytes / 1e6:,.1f}", f"{per_token:.2f}"]
        assert row == [*wanted, f"{int(np.median(found)):,}", f"{max(found):,}"]
    for interval, documents, share in lengths.rows:
        lowest, highest = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", interval))
        inside = [length for length in all_lengths if lowest <= length <= highest]
        assert (documents, share) == (f"{len(inside):,}", f"{sum(inside) / sum(all_lengths):.1%}")
    # Each source with a share of its own: the same figures
    assert look_at("--data_path", f"{first}:0.5", f"{second}:0.5").sections()[0].rows == sources.rows


@pytest.mark.parametrize("pack", [1, 0])
def test_a_row_is_what_the_loader_gives(two_files, pack):
    """Reference: the batch. The texts of the spans are those of the documents."""
    first, second = two_files
    look = look_at("--data_path", first, second, "--max_seq_len", 256, "--pack", pack)
    # The places of documents are known once the texts were read.
    look.sections()
    plan = look.corpus.plan(0)
    for number in (0, 1, plan.n_rows - 1):
        title, pieces = look.row(number)
        batch = Assembler(look.corpus.store)[plan.recipe(range(number, number + 1))]
        tokens = [pair for piece in pieces for pair in zip(piece.tokens, piece.is_trained, strict=True)]
        trained = [token for token, is_trained in tokens if is_trained]
        assert trained == batch.targets[0][batch.targets[0] >= 0].tolist()
        assert f"{len(trained)} trained" in title
        for piece, (document, start, pairs) in zip(pieces, plan.pieces_of_row(number), strict=True):
            begin = int(look.corpus.store.offsets[document]) + start
            assert piece.tokens == look.corpus.store.tokens[begin : begin + pairs + 1].tolist()
            assert re.sub("[⟦⟧]", "", text_of_piece(look.tokenizer, piece)) == look.tokenizer.decode(piece.tokens)
            path, line = re.match(r"(.*):(\d+), ", piece.title).groups()
            text = records(path, None)[int(line) - 1]["text"]
            assert look.encoder.encode([text])[0][start : start + pairs + 1] == piece.tokens


def test_the_text_of_a_piece_has_marks_around_what_is_read():
    tokenizer = small_tokenizer()
    tokens = tokenizer("the cat, 中文 and 🦜", add_special_tokens=False).input_ids
    assert text_of_piece(tokenizer, Piece("", tokens, [True] * len(tokens))) == "the cat, 中文 and 🦜"
    read = len(tokenizer("the cat,", add_special_tokens=False).input_ids)
    is_trained = [i >= read for i in range(len(tokens))]
    assert text_of_piece(tokenizer, Piece("", tokens, is_trained)) == "⟦the cat,⟧ 中文 and 🦜"


def test_hostile_texts_are_shown_as_texts(tmp_path, capsys):
    """No control character reaches the terminal. All texts are in this row."""
    path = write_texts(tmp_path / "<b>a.jsonl", [f"{text} {i}" for i, text in enumerate(HOSTILE * 3)])
    assert inspect_data.main(["--data_path", path, "--row", "0"]) == 0
    out = capsys.readouterr().out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    for hostile in HOSTILE:
        assert printable(hostile) in out


@pytest.mark.parametrize("pack", [1, 0])
def test_of_conversations_a_row_shows_what_is_trained(tmp_path, pack):
    """Reference: the chat template, read plainly."""
    path = write_chats(tmp_path / "chats.jsonl", 20)
    look = look_at("--data_path", path, "--max_seq_len", 64, "--pack", pack)
    # The places of conversations are known once they were read.
    sources = look.sections()[0]
    plan = look.corpus.plan(0)
    seen = 0
    for number in range(plan.n_rows):
        for piece in look.row(number)[1]:
            line = int(re.match(r".*chats.jsonl:(\d+), ", piece.title)[1])
            turns = records(path, None)[line - 1]["conversations"]
            ids, mask = ids_and_mask(look.tokenizer, {"messages": turns})
            length = len(piece.tokens)
            assert (piece.tokens, piece.is_trained) == (ids[:length], mask[:length])
            seen += sum(piece.is_trained)
    (source,) = sources.rows
    assert seen == int(source[-1].split()[0].replace(",", "")) == plan.row_targets(0, plan.n_rows)
    assert source[1] == "20"


def places_of_rows(look):
    """{what the title of a piece says of its place: how often}"""
    # It reads the texts, by which the places are known.
    look.sections()
    places = Counter()
    for row in range(look.corpus.plan(0).n_rows):
        for piece in look.row(row)[1]:
            places[piece.title.split(",")[0].rpartition("/")[2]] += 1
    return places


def test_a_copy_in_a_row_has_its_own_place(tmp_path):
    """Reference: each line of the files stands in one row. With --deduplicate the first of equal lines does."""
    same = "the same text three times over"
    first = write_texts(tmp_path / "a.jsonl", ["one", same, same])
    second = write_texts(tmp_path / "b.jsonl", [same, "two", "one"])
    flags = ["--data_path", first, second, "--max_seq_len", "16"]
    look = look_at(*flags)
    assert places_of_rows(look) == {f"{name}.jsonl:{line}": 1 for name in "ab" for line in (1, 2, 3)}
    look = look_at(*flags, "--deduplicate", "exact")
    assert places_of_rows(look) == {"a.jsonl:1": 1, "a.jsonl:2": 1, "b.jsonl:2": 1}


def test_what_can_be_mended_is_a_line(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["one text"])
    for arguments, message in (
        (["--row", "7"], "--row 7: the first epoch has 1 row, counted from 0"),
        (["--tokenizer_path", str(tmp_path)], "no tokenizer can be loaded"),
    ):
        with pytest.raises((UserError, DataError), match=message):
            inspect_data.main(["--data_path", path, *arguments])


def test_the_store_that_is_made_is_the_one_that_the_trainer_opens(tmp_path, capsys):
    path = write_texts(tmp_path / "a.jsonl", [f"document {i % 30}" for i in range(40)])
    assert inspect_data.main(["--texts", "0", "--data_path", path, "--deduplicate", "exact"]) == 0
    assert "tokenising a" in capsys.readouterr().out
    train(data_path=path, out_dir=tmp_path / "out", deduplicate="exact")
    assert "tokenis" not in capsys.readouterr().out
    assert len(list((tmp_path / ".token_store").glob("a-*"))) == 1
