"""Copies to the letter and near ones. References: sets of substrings, a dictionary, planted copies."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from common.errors import DataError
from dataset.quality import copies as module
from dataset.quality.copies import NONE, exact_copies, near_copies, shingles
from tests.dataset.quality.planted import changed, chinese, english, jaccard
from tests.helpers import ROOT, SHARED, needs_shared


def no_exact(n):
    return exact_copies(np.arange(n, dtype=np.uint64))


def find(texts):
    return near_copies(enumerate(texts), no_exact(len(texts)))


def test_shingles_are_the_runs_of_five_characters():
    """Reference: substrings. Two hashes are the same where the substrings are, in all texts together."""
    generator = random.Random(11)
    for _ in range(100):
        texts = []
        for _ in range(generator.randint(1, 6)):
            texts.append("".join(generator.choices("aAbB 中文\n\t\U0001f600", k=generator.randint(0, 30))))
        hashes, begins = shingles(texts)
        expected = []
        for number, text in enumerate(texts):
            assert begins[number] == len(expected)
            plain = " ".join(text.lower().split()).ljust(5)
            expected += [plain[i : i + 5] for i in range(len(plain) - 4)]
        assert len(hashes) == len(expected) == begins[-1]
        assert len(set(zip(expected, hashes.tolist(), strict=True))) == len(set(expected)) == len(set(hashes.tolist()))


def test_half_a_surrogate_pair_is_a_character_like_others():
    hashes, _ = shingles(["ab\ud800cd", "ab\udfffcd"])
    assert len(hashes) == 2 and hashes[0] != hashes[1]


def test_exact_copies_are_those_of_an_earlier_hash():
    """Reference: a dictionary. All 50 of 50 planted ones among others."""
    generator = random.Random(12)
    for size, kinds in ((0, 1), (1, 1), (40, 5), (300, 250)):
        numbers = [generator.randrange(kinds) for _ in range(size)]
        first = {}
        expected = []
        for i, number in enumerate(numbers):
            expected.append(first.get(number, NONE))
            first.setdefault(number, i)
        found = exact_copies(np.array(numbers, np.uint64))
        assert found.of.tolist() == expected
        assert found.is_exact.tolist() == [of != NONE for of in expected]
        assert found.exact == len(numbers) - len(first)
    planted = [*range(1000), *generator.sample(range(1000), 50)]
    assert exact_copies(np.array(planted, np.uint64)).exact == 50


@pytest.mark.parametrize("kind", [english, chinese])
def test_near_duplicates_are_found_and_nothing_else(kind):
    """20 planted copies with a similarity of 0.8 to 0.9 among 400 texts, Chinese without a space included."""
    generator = random.Random(1)
    texts = [kind(generator) for _ in range(400)]
    originals = generator.sample(range(400), 20)
    planted = [changed(texts[i], generator, 0.8, 0.9) for i in originals]
    found = find(texts + planted)
    assert (found.of[400:] == originals).sum() >= 19
    assert (found.of[:400] == NONE).all()


def test_white_space_and_case_make_no_difference():
    text = english(random.Random(0))
    found = find([text, "  " + text.upper().replace(" ", "\n\n")])
    assert found.of.tolist() == [NONE, 0] and found.similarity[1] == 1 and found.near == 1 and found.exact == 0


def test_the_similarity_that_is_told_is_about_the_true_one():
    """Reference: the sets. The share of 240 equal numbers has a standard deviation of 0.026 at 0.8."""
    generator = random.Random(2)
    errors = []
    for i in range(30):
        text = (english if i % 2 else chinese)(generator)
        other = changed(text, generator, 0.8, 0.95)
        found = find([text, other])
        if found.of[1] == 0:
            errors.append(found.similarity[1] - jaccard(text, other))
    assert len(errors) >= 29
    assert max(map(abs, errors)) < 0.11 and abs(np.mean(errors)) < 0.02


def test_texts_that_share_less_are_left_alone():
    generator = random.Random(3)
    texts = []
    for _ in range(40):
        text = english(generator)
        texts += [text, changed(text, generator, 0.5, 0.6)]
    assert find(texts).near == 0


def test_a_chain_of_small_changes_is_cut():
    """Each text is near the one before it. The third is not near the first, so it stays."""
    generator = random.Random(4)
    first = english(generator, 200)
    second = changed(first, generator, 0.84, 0.86)
    third = changed(second, generator, 0.8, 0.82)
    assert jaccard(first, third) < 0.72
    assert find([first, second, third]).of.tolist() == [NONE, 0, NONE]


def test_many_copies_of_one_text_are_all_copies_of_the_first():
    text = english(random.Random(5))
    found = find([text + " " * i for i in range(300)])
    assert found.of.tolist() == [NONE] + [0] * 299


def test_exact_copies_are_not_compared_again():
    generator = random.Random(6)
    text = english(generator)
    near = changed(text, generator, 0.85, 0.95)
    exact = exact_copies(np.array([7, 7, 8], np.uint64))
    found = near_copies(enumerate([text, text, near]), exact)
    assert found.of.tolist() == [NONE, 0, 0]
    assert (found.exact, found.near) == (1, 1)


def test_short_empty_and_no_texts():
    assert find([]).of.tolist() == []
    assert find(["", "a", "b", " ", "A"]).of.tolist() == [NONE, NONE, NONE, 0, 1]


def test_of_a_long_text_the_beginning_counts(monkeypatch):
    monkeypatch.setattr(module, "MOST_CHARACTERS", 1000)
    generator = random.Random(7)
    same, *others = (english(generator, 400) for _ in range(3))
    assert find([same + others[0], same + others[1]]).of.tolist() == [NONE, 0]


def test_the_size_of_batches_and_of_comparisons_changes_nothing(monkeypatch):
    generator = random.Random(8)
    texts = [english(generator) for _ in range(50)]
    texts += [changed(text, generator, 0.7, 0.85) for text in texts]
    expected = find(texts)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1)
    monkeypatch.setattr(module, "PAIRS", 3)
    found = find(texts)
    assert found.of.tolist() == expected.of.tolist() and found.near > 10
    assert found.similarity.tolist() == expected.similarity.tolist()


def test_another_process_with_another_number_of_threads_finds_the_same(tmp_path):
    generator = random.Random(9)
    texts = [english(generator) for _ in range(40)]
    texts += [changed(text, generator, 0.72, 0.8) for text in texts]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    program = (
        "import json, sys\nfrom dataset.quality.copies import *\n"
        "texts = json.load(open(sys.argv[1]))\nexact = exact_copies(np.arange(len(texts), dtype=np.uint64))\n"
        "print(near_copies(enumerate(texts), exact).of.tolist())"
    )
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, str(tmp_path / "texts.json")]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert json.loads(ended.stdout) == find(texts).of.tolist(), ended.stderr


def test_without_the_library_a_line_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(DataError, match="pip install rensa"):
        find(["a"])


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("name", ["en_wiki", "zh_wiki", "code_python"])
def test_near_duplicates_planted_in_a_corpus(name):
    """What is said to be near is near by the sets too; of what is near by 0.8 nearly all is found."""
    path = SHARED / "corpora" / f"{name}.train.jsonl"
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(3000), strict=False)]
    generator = random.Random(10)
    long_enough = [i for i, text in enumerate(texts) if 300 < len(text) < 20_000]
    originals = generator.sample(long_enough, 20)
    n = len(texts)
    texts += [changed(texts[i], generator, 0.8, 0.9) for i in originals]
    found = find(texts)
    assert (found.of[n:] != NONE).sum() >= 19
    for number in np.flatnonzero(found.of != NONE):
        assert jaccard(texts[found.of[number]], texts[number]) > 0.65
