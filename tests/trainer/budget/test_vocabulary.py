"""The tokenizer of a planned run. References: the .json beside the weights, the law, a training for one size alone."""

import errno
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from common.errors import DataError
from dataset.corpus import Corpus
from dataset.reading.settings import DEFAULTS
from dataset.shares import group_sources
from dataset.store import build
from dataset.tokenizing.byte_level_bpe import SPECIAL_TOKENS, train_bpe
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.weight_record import VOCABULARY_FIELD, read_record
from scripts import generate
from tests.helpers import ROOT, SMALL, before_update, command_line, flags, train, write_records, write_texts
from trainer import train_pretrain, train_sft
from trainer.budget import own_tokenizer, vocabulary
from trainer.budget.own_tokenizer import FIGURES, HELD_OUT_SHARE, Request, own_tokenizers, train_sizes
from trainer.budget.planner import fixed_fields, sizes
from trainer.budget.vocabulary import Machine, best_entries
from trainer.pretrain.settings import PretrainSettings

FREE = {"batch_size": None, "accumulation_steps": None, "num_attention_heads": None, "num_hidden_layers": None}
PLANNED = {**FREE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "budget_tokens": 3000}


def sentences(n_bytes):
    """Lines of made-up words, the frequent ones of a Zipf law."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 9))) for _ in range(3000)]
    weights = [1 / rank for rank in range(1, 3001)]
    return " ".join(generator.choices(words, weights, k=n_bytes // 6))[:n_bytes]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    whole = sentences(450_000)
    texts = [f"{at} {whole[at : at + 1000]}" for at in range(0, len(whole), 1000)]
    return write_texts(tmp_path_factory.mktemp("text") / "text.jsonl", texts)


def request(path, held_out=HELD_OUT_SHARE):
    return Request(group_sources([str(path)]), DEFAULTS, held_out, 4e7)


def test_smaller_tokenizers_are_those_of_a_training_for_them(text, tmp_path, monkeypatch):
    trained = Mock(wraps=train_bpe)
    monkeypatch.setattr(own_tokenizer, "train_bpe", trained)
    train_sizes(request(text), tmp_path / "own")
    figures = json.loads((tmp_path / "own" / FIGURES).read_text())
    assert [*figures["sizes"]] == ["0", "1024", "1600"]
    assert figures["sizes"]["1600"] > figures["sizes"]["1024"]
    alone = train_bpe(trained.call_args_list[0].args[0], 1024)
    assert alone.to_str() == Tokenizer.from_file(str(tmp_path / "own" / "1024" / "tokenizer.json")).to_str()
    assert [alone.token_to_id(token) for token in SPECIAL_TOKENS] == [*range(13)]


@pytest.mark.parametrize("held_out", [HELD_OUT_SHARE, 0.2])
@pytest.mark.parametrize("n_texts", [1, 8, 450])
def test_what_is_held_out_trains_no_tokenizer(text, tmp_path, n_texts, held_out):
    """Reference: the documents that the corpus holds out."""
    path, encoder = text, DocumentEncoder(load_tokenizer(ROOT / "model"))
    lines = [json.loads(line)["text"] for line in Path(text).read_text().splitlines()]
    if n_texts < 450:
        path = write_texts(tmp_path / "long.jsonl", ["\n".join(lines[at::n_texts]) for at in range(n_texts)])
    texts, n_bytes, _ = own_tokenizer.training_texts(request(path, held_out), encoder)
    corpus = Corpus([str(path)], encoder, max_seq_len=64, seed=0, val_fraction=held_out, progress=False)
    offsets = corpus.store.offsets
    for document in corpus.val_documents:
        left_out = encoder.decode(corpus.store.tokens[offsets[document] : offsets[document + 1]].tolist())
        assert left_out[-60:] not in "".join(texts) and left_out[:60] not in "".join(texts)
    assert n_texts == 8 or (1 - 1.6 * held_out) * n_bytes < sum(map(len, texts)) < n_bytes


def test_what_a_run_holds_out_after_all_is_noticed(tmp_path):
    """A giant among short texts, whose end is left out; the same with copies that differ in line ends, one side of which is known."""
    encoder, notes = DocumentEncoder(load_tokenizer(ROOT / "model")), [f"{at}\n{sentences(900)}" for at in range(300)]
    copies = [note.replace("\n", "\r\n") for note in notes]
    for texts, known in (([*notes, sentences(900_000)], False), ([*notes, *copies], True)):
        path = write_texts(tmp_path / f"{known}.jsonl", texts)
        train_sizes(request(path, 0.03), tmp_path / str(known))
        corpus = Corpus([str(path)], encoder, max_seq_len=64, seed=0, val_fraction=0.03, progress=False)
        assert (corpus.split_document is not None) != known
        assert vocabulary.knows_held_out(corpus, tmp_path / str(known)) == known


# bytes per token of text that none of these has seen, from 39 MB of en_wiki, 80 MB of en_wiki and zh_wiki, and 1 MB of Shakespeare
SIZES = (0, 1024, 1600, 3200, 6144, 12800, 25600, 51200, 102400)
EN_WIKI = dict(zip(SIZES, (3.072, 2.387, 2.658, 3.082, 3.483, 3.902, 4.223, 4.454, 4.622), strict=True))
SHAKESPEARE = dict(zip(SIZES, (2.714, 2.574, 2.906, 3.406, 3.719), strict=False))
BOTH_WIKIS = {0: 3.185, 6144: 3.223, 12800: 3.661, 25600: 4.047, 51200: 4.41}


def entries_for(folder, words, packing, n_bytes):
    figures = {"sizes": packing, "difficulty": 0.866, "bytes": 1, "text_bytes": n_bytes, "seconds": 1}
    (folder / FIGURES).write_text(json.dumps(figures))
    settings = PretrainSettings.parse(words.split())
    return best_entries(folder, settings, Machine(7e11, None, "cpu"), lambda n: sizes(fixed_fields(settings, n)))


@pytest.mark.parametrize(
    ("words", "n_bytes", "entries"),
    [("--budget 20s", 39e6, 51200), ("--budget_flops 2e13", 39e6, 102400), ("--budget_flops 5e12", 1e6, 1600)],
)
def test_more_work_and_more_text_want_more_entries(tmp_path, capfd, words, n_bytes, entries):
    assert entries_for(tmp_path, words, SHAKESPEARE if n_bytes == 1e6 else EN_WIKI, n_bytes) == entries
    assert f"{entries:,} entries" in capfd.readouterr().out


@pytest.mark.parametrize("words", ["--budget_tokens 10k", "--budget 10m"])
def test_this_repositorys_stays_where_no_model_suits_the_text_or_it_packs_more(tmp_path, words):
    assert entries_for(tmp_path, words, {0: 3.5, 1024: 2.2}, 4e6) == 0


@pytest.mark.parametrize(
    ("packing", "tokens", "measured"),
    # bits per byte of 160 x 2 and 192 x 3 relative to this repository's
    [
        (EN_WIKI, 3.95e6, {6144: 0.971, 12800: 0.942, 25600: 0.926, 51200: 0.911}),
        (EN_WIKI, 29.5e6, {25600: 0.940}),
        (BOTH_WIKIS, 3.9e6, {12800: 0.962, 25600: 0.956, 51200: 0.934}),
    ],
)
def test_the_law_meets_the_gains_that_were_measured(tmp_path, capfd, packing, tokens, measured):
    width, layers = (160, 2) if tokens < 1e7 else (192, 3)
    words = f"--budget_tokens {tokens} --hidden_size {width} --num_hidden_layers {layers}"
    for size, ratio in measured.items():
        entries_for(tmp_path, words, {0: packing[0], size: packing[size]}, 39e6)
        told = int(capfd.readouterr().out.split("about ")[1].split("%")[0])
        assert 1 - told / 100 == pytest.approx(ratio, abs=0.02)


def test_a_plan_trains_a_tokenizer_that_all_find_and_a_kill_does_not_lose(text, tmp_path, capfd, monkeypatch):
    """Reference: a run that was not killed. Its weights are fine-tuned and continued without a flag."""
    options = {**PLANNED, "data_path": text, "cache_dir": tmp_path / "cache"}
    whole = train(**options, out_dir=tmp_path / "whole")
    assert "tokenizer: 1,024 entries" in capfd.readouterr().out
    monkeypatch.setattr(own_tokenizer, "train_sizes", None)

    def kill():
        raise KeyboardInterrupt

    with before_update(1, kill), pytest.raises(KeyboardInterrupt):
        train(**options, out_dir=tmp_path / "killed")
    killed = train(**options, out_dir=tmp_path / "killed", from_resume=1)
    weight = killed.job.files.outputs["weights"]
    assert weight.read_bytes() == whole.job.files.outputs["weights"].read_bytes()
    assert read_record(weight)[VOCABULARY_FIELD] == killed.job.parts.vocabulary
    assert (tmp_path / "killed" / "pretrain_32.tokenizer" / "tokenizer.json").is_file()
    # A finished run finds its tokenizer by its plan alone.
    options["cache_dir"] = None
    assert train_pretrain.main(flags(**options, out_dir=tmp_path / "killed", from_resume=1)) == 0
    chats = [[{"role": "user", "content": "etao"}, {"role": "assistant", "content": "shrdlu"}]] * 8
    path = write_records(tmp_path / "chats.jsonl", [{"conversations": chat} for chat in chats])
    words = f"--data_path {path} --out_dir {tmp_path / 'killed'} --max_updates 2 --device cpu --report 0".split()
    assert train_sft.main([*words, "--use_compile", "0", "--cpu_processes", "1"]) == 0
    capfd.readouterr()
    tuned = str(tmp_path / "killed" / "full_sft_32.pth")
    generate.main(["--weight", tuned, "--device", "cpu", "--max_new_tokens", "2", "--chat", "etao"])
    assert "another tokenizer" not in capfd.readouterr().err
    kept = train(**options, out_dir=tmp_path / "kept", tokenizer_path="model")
    assert kept.job.config.vocab_size == 6400 and not (tmp_path / "kept" / "pretrain_32.tokenizer").exists()


def test_two_starts_at_once_train_one_tokenizer_and_keep_the_digests_of_the_files(text, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(build, "TIMESTAMP_MARGIN_S", -10.0)
    both = [request(shutil.copy(text, tmp_path))] * 2
    # of a start that was killed, with other text
    (tmp_path / ".token_store" / ".tokenizer-0.store-under-way" / "1024").mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(own_tokenizers, both, [True, True])
    assert one == other and (one / FIGURES).is_file() and not [*one.parent.glob("*under-way")]
    assert capfd.readouterr().out.count("training a tokenizer on the text") == 1
    stats = build.stats_of([tmp_path / "text.jsonl"])
    assert [entry[:-1] for entry in build.read_hashes(one.parent)] == [list(stat) for stat in stats]


def test_a_full_disk_is_one_line_and_leaves_nothing(text, tmp_path, monkeypatch):
    def full(request, folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(own_tokenizer, "train_sizes", full)
    with pytest.raises(DataError, match="No space left on device; --cache_dir names another folder"):
        own_tokenizers(request(shutil.copy(text, tmp_path)), False)
    assert not list((tmp_path / ".token_store").glob("*/"))


def test_a_resume_without_a_checkpoint_leaves_the_tokenizer_of_a_start_that_was_killed(tmp_path):
    beside = tmp_path / "pretrain_32.tokenizer"
    for left, expected in ((beside, ROOT / "model"), (tmp_path / "pretrain_32_resume", beside)):
        left.mkdir()
        settings = PretrainSettings.parse(["--from_resume", "1", "--hidden_size", "32", "--out_dir", str(tmp_path)])
        assert settings.tokenizer_path == str(expected)


@pytest.mark.slow
def test_processes_share_a_tokenizer(text, tmp_path):
    options = {**SMALL, **PLANNED, "data_path": text, "cache_dir": tmp_path / "cache", "out_dir": tmp_path / "two"}
    two = command_line(flags(**options, cpu_processes=2))
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("training a tokenizer on the text") == 1
    record = read_record(tmp_path / "two" / "pretrain_32.pth")
    assert record["vocab_size"] == 1024 and (tmp_path / "two" / "pretrain_32.tokenizer").is_dir()
