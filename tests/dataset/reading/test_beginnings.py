"""What is said of a text file by its beginning. References: files as people have them, made here."""

from dataset.corpus import Corpus
from dataset.reading.beginnings import notices_on_texts
from dataset.reading.settings import PARAGRAPHS, TextSettings
from tests.helpers import write_texts

PROSE = "It was the best of times, it was the worst of times, it was the age of wisdom, and of foolishness too.\n"
DIALOGUE = "Who is there?\nIt is me.\nCome in, then.\n\n"


def test_a_text_file_that_is_another_kind_or_many_texts_gets_a_line(tmp_path):
    for content, advice in (
        ('{"anything": "a", "label": 1}\n{"anything": "b", "label": 0}\n', "looks like .jsonl"),
        ('[\n {"anything": "a"},\n {"anything": "b"}]\n', "looks like .json:"),
        ('["a text", "another"]', "looks like .json:"),
        ("0\ta film that one should see\n1\tno\n" * 9, "looks like .tsv"),
        ('review,label\n"good, all in all, and long enough",1\n"bad",0\n', "looks like .csv"),
        ("评论,标签\n很好,1\n不好,0\n", "looks like .csv"),
        ("Smith, John\nMiller, Ann\n" * 9, ""),
        (f"{PROSE}<|endoftext|>\n" * 3, "many <|endoftext|>: if they divide its texts, add --split_text '<|endo"),
        (f"{PROSE}<|endoftext|>\n", ""),
        ('<doc id="1" title="A">\nA\n\nIt is.\n</doc>\n\n' * 3, "texts, add --split_text '</doc>'"),
        (f"WARC/1.0\r\nWARC-Type: conversion\r\n\r\n{PROSE}\r\n\r\n" * 3, "texts, add --split_text 'WARC/1.0'"),
        (">sp|P1|A human\nMKTAYIAKQRQISFVK\nGLEERLGLIE\n" * 400, "texts, add --split_text '>'"),
        ('[Event "A"]\n[Site "B"]\n\n1. e4 e5 1-0\n\n' * 300, "texts, add --split_text '[Event '"),
        (f"> quoted\n{PROSE}" * 9, ""),
        ((PROSE.strip() * 9 + "\n") * 40, "long lines: if each is a text, add --split_text lines"),
        (("the moon is up\n" * 20 + "\n") * 60, "short lines: if they are several texts, add --split_text blank"),
        (("emma\nolivia\n" * 40 + "\n") * 20, "short lines: if they are several texts, add --split_text lines"),
        ("12,34,567\n89,1,2\n" * 9, ""),
        ("1\t2\t3\n" * 9, ""),
        ("emma\nolivia\n" * 600, "short lines: if they are several texts, add --split_text lines"),
        (DIALOGUE * 400, "short lines: if they are several texts, add --split_text blank"),
        (PROSE * 1500, ""),
    ):
        files = [tmp_path / "a.txt", tmp_path / "b.txt"]
        for file in files:
            file.write_text(content)
        lines = notices_on_texts(files, None)
        assert len(lines) == bool(advice), content[:60]
        assert not advice or (lines[0].startswith(f"warning: {files[0]} and 1 more: read as ") and advice in lines[0])


def test_a_split_that_does_nothing_is_said_and_one_that_is_there_is_not_asked_for(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(DIALOGUE * 400)
    assert notices_on_texts([file], "blank") == notices_on_texts([file], PARAGRAPHS) == []
    assert "no ### of --split_text" in notices_on_texts([file], "###")[0]
    assert "--split_text lines has no effect" in notices_on_texts([tmp_path / "a.jsonl"], "lines")[0]
    assert notices_on_texts([tmp_path / "a.jsonl"], PARAGRAPHS) == []


def test_a_split_that_has_an_effect_on_one_file_of_a_run_is_not_called_in_vain(tmp_path, encoder):
    lines = write_texts(tmp_path / "a.jsonl", ["a cat", "a mat"])
    (tmp_path / "b.txt").write_text("the cat\nsat\n")
    text, by_line = str(tmp_path / "b.txt"), TextSettings(split_text="lines")
    for data_path, val_path, is_vain in (([text], lines, 0), ([lines], text, 0), ([lines], None, 1)):
        corpus = Corpus(data_path, encoder, by_line, max_seq_len=8, seed=0, val_path=val_path)
        assert sum("--split_text lines has no effect" in line for line in corpus.notices) == is_vain
