"""scripts/inspect_data.py. References: planted copies and leaks, counts by hand, the batches of the loader."""

import html
import json
import random
import re
from collections import Counter

import numpy as np
import pytest

from common.errors import DataError, UserError
from common.wording import printable
from dataset.loader import assemble
from scripts import inspect_data
from scripts.inspect_data import DataLook, parse_args, row_of, spans_of
from tests.chats import ids_and_mask, write_chats
from tests.dataset.quality.planted import changed, chinese, english
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT


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


def look_at(*arguments):
    return DataLook(parse_args([*map(str, arguments), "--tokenizer_path", str(ROOT / "model")]))


def test_all_that_was_planted_is_found_and_nothing_else(planted):
    folder, first, second, _, _ = planted
    sections = {section.title: section for section in look_at("--data_path", first, second).sections()}
    of_first, of_second = sections["Copies of earlier documents"].rows
    assert of_first == [first, "0", "0"] and of_second[1].startswith("50 ") and 19 <= int(of_second[2].split()[0]) <= 20


def test_counts_are_those_of_the_files(planted):
    """Reference: the texts and their ids, one by one."""
    folder, first, second, _, _ = planted
    look = look_at("--data_path", first, second)
    sources, lengths, _, languages, _ = look.sections()
    all_lengths = []
    for row, path in zip(sources.rows, (first, second), strict=True):
        with open(path, encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
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
    assert {row[0] for row in languages.rows} == {"Latin letters", "Chinese"}
    # Each source with a share of its own: the same figures
    assert look_at("--data_path", f"{first}:0.5", f"{second}:0.5").sections()[0].rows == sources.rows


@pytest.mark.parametrize("pack", [1, 0])
def test_a_row_is_what_the_loader_gives(planted, pack):
    """Reference: the batch. The texts of the spans are those of the documents."""
    folder, first, second, _, _ = planted
    look = look_at("--data_path", first, second, "--max_seq_len", 256, "--pack", pack)
    # The places of documents are known once the texts were read.
    look.sections()
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


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
        for piece in row_of(look, number).pieces:
            line = int(re.match(r".*chats.jsonl:(\d+), ", piece.title)[1])
            ids, mask = ids_and_mask(look.tokenizer, {"messages": lines_of(path)[line - 1]["conversations"]})
            tokens = [token for span in piece.spans for token in span.tokens]
            trained = [span.is_trained for span in piece.spans for _ in span.tokens]
            assert (tokens, trained) == (ids[: len(tokens)], mask[: len(tokens)])
            assert f"{sum(trained)} token" in piece.title
            assert "".join(span.text for span in piece.spans) == look.tokenizer.decode(tokens)
            seen += sum(trained)
    (source,) = sources.rows
    assert seen == int(source[-1].split()[0].replace(",", "")) == plan.row_targets(0, plan.n_rows)
    assert source[1] == "20"


def places_of_rows(look):
    """{what the title of a piece says of its place: how often}"""
    # It reads the texts, by which the places are known.
    look.sections()
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
        (["--out", str(tmp_path / "no" / "page.html")], "page.html: No such file"),
        (["--tokenizer_path", str(tmp_path)], "no tokenizer can be loaded"),
    ):
        with pytest.raises((UserError, DataError), match=message):
            inspect_data.main(["--data_path", path, *arguments])
