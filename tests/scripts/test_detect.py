"""scripts/detect.py. References: the Detector's own passages, the rules of HTML and of terminals, and a real browser.

`tests/trainer/electra/test_detector.py` tests what is told of a text.
"""

import html
import io
import json
import re
import sys

import pytest
import torch

from common.errors import UserError
from common.terminal import width_of_terminal
from common.wording import printable
from model.electra.detection import Passage, Word, passage_of_record
from scripts import detect
from scripts.detect import main, write_page
from tests.scripts.playground.chromium import chromium, needs_chromium, requested, set_window
from tests.scripts.playground.pages import HOSTILE
from tests.trainer.electra.electra_folder import write_run
from trainer.electra.detector import open_detector
from trainer.electra.passages import passage_lines

TEXT = "The cat sat on a mat, while dogs ran over far hills."
# What a terminal or a browser would obey, but for line feeds and tabs
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

# The page's own elements
OURS = {"meta", "title", "style", "body", "h1", "p", "span", "u", "s", "b", "section", "details", "summary", "small"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), length=24, threshold=0.5)[0]


def passages(folder, texts, share=0.0):
    detector = open_detector("--model", str(folder), torch.device("cpu"))
    return [detector.passage(text, share, 42 + number) for number, text in enumerate(texts)]


@pytest.mark.parametrize("share", [None, "0.3"])
def test_texts_are_told_with_what_stands_out(folder, capsys, share):
    corrupt = [] if share is None else ["--corrupt", share]
    assert main([TEXT, "the cat", "--model", str(folder), *corrupt]) == 0
    wanted = passage_lines(passages(folder, [TEXT, "the cat"], float(share or 0)), width_of_terminal(), False)
    assert capsys.readouterr().out == f"{wanted}\n"


def test_a_text_that_the_tokenizer_does_not_know_is_told(folder, capsys):
    """All its words are [UNK], of which no doubt means anything."""
    assert main([TEXT, "我爱北京天安门", "--model", str(folder)]) == 0
    assert "knows less than half of 1 text: what is said of unknown words" in capsys.readouterr().err
    assert main([TEXT, "--model", str(folder)]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_line_has_each_doubted_word_with_its_probability():
    words = [Word("", "The", 0.1), Word(" ", "cat", 0.91, "dog"), Word(" ", "sat", 0.6), Word(" ", "off", 0.2, "on")]
    passage = Passage(words, ".", 0.5, True)
    lines = passage_lines([passage], 100, False).splitlines()
    assert lines[2:6] == [
        "original  The *dog* sat *on*",
        "now       The >>cat<< >>sat<< off",
        "doubted   cat 0.91 (was dog); sat 0.60 (as it was)",
        "missed    off 0.20 (was on)",
    ]
    assert lines[-1] == "1 of 2 replaced words doubted, 1 of 2 others; a word is doubted from a probability of 0.50 on"
    in_colour = passage_lines([passage], 100, True).splitlines()
    assert in_colour[3] == "now       The \x1b[1;4;31mcat\x1b[0m \x1b[1;4;31msat\x1b[0m \x1b[33moff\x1b[0m"
    plain = Passage([Word("", "The", 0.1), Word(" ", "cat", 0.91)], ".", 0.5)
    lines = passage_lines([plain], 100, False).splitlines()
    assert lines[2:4] == ["text      The >>cat<<", "doubted   cat 0.91"]
    assert lines[-1] == "1 of 2 words doubted; a word is doubted from a probability of 0.50 on"


def test_a_page_counts_words_as_the_terminal_does(tmp_path):
    """Also one word alone. Reference: the lines of the terminal."""
    plain = Passage([Word("", "cat", 0.91)], ".", 0.5)
    replaced = Passage([Word("", "cat", 0.91, "dog"), Word(" ", "sat", 0.2)], ".", 0.5, True)
    for passage, said in ((plain, "1 of 1 word doubted"), (replaced, "1 of 1 replaced word doubted, 0 of 1 other")):
        assert passage_lines([passage], 100, False).splitlines()[-1].startswith(f"{said}; ")
        write_page(str(tmp_path / "page.html"), "model", [passage])
        assert f'<p class="soft">{said}</p>' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_json_has_every_word(folder, capsys):
    assert main([TEXT, "--model", str(folder), "--json", "--threshold", "0.4", "--corrupt", "0.2"]) == 0
    record = json.loads(capsys.readouterr().out)
    (wanted,) = passages(folder, [TEXT], 0.2)
    assert passage_of_record(record) == Passage(wanted.words, wanted.after, 0.4, True)
    assert [word["doubted"] for word in record["words"]] == [word.probability >= 0.4 for word in wanted.words]


def test_a_file_and_a_pipe_are_texts_between_blank_lines(folder, tmp_path, capsys, monkeypatch):
    content = f"\ufeff{TEXT}\r\nthe mat\r\n \r\n\r\na dog\n".encode()
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert main(["--file", str(path), "--model", str(folder), "--json"]) == 0
    of_file = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["--model", str(folder), "--json"]) == 0
    assert capsys.readouterr().out == of_file
    found = [passage_of_record(json.loads(line)) for line in of_file.splitlines()]
    texts = ["".join(word.before + word.text for word in passage.words) + passage.after for passage in found]
    assert texts == [f"{TEXT}\nthe mat", "a dog"]


def test_words_are_replaced_at_random_where_there_is_no_generator(tmp_path, capsys):
    folder, _, _ = write_run(tmp_path, has_generator=False)
    assert main([TEXT, "--model", str(folder / "discriminator"), "--corrupt", "0.3"]) == 0
    assert "replaced at random" in capsys.readouterr().err


def test_what_the_user_can_mend_is_told_in_a_line(folder, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_bytes(b"\n \n")
    (tmp_path / "large.txt").write_bytes(b"a" * 1_000_001)
    monkeypatch.setattr(sys, "stdin", Terminal())
    model = ["--model", str(folder)]
    for arguments, match in (
        (model, "no text to read"),
        ([TEXT, "--file", "a.txt", *model], "drop one of them"),
        (["--file", str(tmp_path / "a.txt"), *model], "byte 3 is no UTF-8"),
        (["--file", str(tmp_path / "blank.txt"), *model], "no text in there"),
        (["--file", str(tmp_path / "large.txt"), *model], "larger than 1,000,000 bytes"),
        (["--file", str(tmp_path), *model], "not a regular file"),
        (["--file", str(tmp_path / "none.txt"), *model], "No such file"),
        ([TEXT, "--out", "page.htm", *model], "ends in .html"),
        ([TEXT, "--out", str(tmp_path / "none" / "page.html"), *model], "cannot be written"),
        ([TEXT, "--model", str(tmp_path)], "no config.json there"),
    ):
        with pytest.raises(UserError, match=match) as caught:
            main(arguments)
        assert "\n" not in str(caught.value)


def test_hostile_texts_are_shown_as_texts(folder, tmp_path, capsys, monkeypatch):
    """On a terminal with colours and on the page: no control character, no tag that is not the page's own."""
    page = tmp_path / "detect.html"
    monkeypatch.setattr(detect, "has_colours", lambda stream: True)
    for extra in ([], ["--corrupt", "0.4"], ["--threshold", "0.0001"], ["--threshold", "1"]):
        assert main([*HOSTILE, "--model", str(folder), "--out", str(page), *extra]) == 0
        out = capsys.readouterr().out
        own_codes = re.compile("\x1b\\[(1;4;31|33|32|0)m")
        assert own_codes.search(out) and not OBEYED.search(own_codes.sub("", out))
        text = page.read_text(encoding="utf-8")
        assert not OBEYED.search(text)
        tags = set(re.findall(r"<(/?[a-z!][a-z0-9]*)", text))
        assert tags <= {*OURS, *(f"/{tag}" for tag in OURS), "html", "/html", "head", "/head", "!doctype"}
        assert not re.search(r"<[^>]*\s(on\w+|href|src|style)\s*=", text)
    # Where none is doubted, what is left without the page's own tags is the texts as they were written.
    without_tags = html.unescape(re.sub("<[^<>]*>", "", text))
    for hostile in HOSTILE:
        assert printable(hostile).strip("\n") in without_tags
    assert main([*HOSTILE, "--model", str(folder), "--json"]) == 0
    assert capsys.readouterr().out.isascii()


# ------------------------------------------------------------------------------------------- in a browser

PARAGRAPH = (
    "The harbour lies in the north of the town and was built by the merchants of the river in the year 1712, when the old "
    "one could no longer be reached by ships of more than two hundred tons."
)


def made_up(is_corrupted):
    """A passage with doubted words, right and wrong, and with a missed one."""
    words = []
    for number, text in enumerate(PARAGRAPH.split()):
        probability = 0.93 if number in (4, 11, 20) else 0.04
        original = "sandwich" if is_corrupted and number in (4, 15, 20) else None
        words.append(Word(" " if number else "", text, probability, original))
    return Passage(words, "", 0.5, is_corrupted)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("is_dark", [False, True])
def test_the_page_shows_at_a_glance_what_is_doubted(browser, tmp_path, width, is_dark):
    """References: the styles that the browser has computed, and its own log of requests."""
    page = tmp_path / "detect.html"
    hostile = Passage([Word(" ", text, 0.9, text) for text in HOSTILE], "", 0.5, True)
    write_page(str(page), "out/electra_small", [made_up(True), made_up(False), hostile])
    set_window(browser, width, is_dark)
    requested(browser)
    browser.get_log("browser")
    browser.get(page.as_uri())
    assert [url for url in requested(browser) if not url.startswith(("file:", "data:,"))] == []
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    assert browser.title == "Doubted words"
    # Nothing is wider than the window.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    first = browser.find_elements("css selector", ".passage")[0]
    doubted = first.find_elements("css selector", "u.doubted")
    assert [word.text for word in doubted] == [PARAGRAPH.split()[number] for number in (4, 11, 20)]
    usual = first.find_element("css selector", ".words span")
    for word in doubted:
        assert word.is_displayed() and "underline" in word.value_of_css_property("text-decoration-line")
        for style in ("background-color", "font-weight"):
            assert word.value_of_css_property(style) != usual.value_of_css_property(style)
        assert contrast(browser, word) >= 4.5
    assert contrast(browser, first.find_element("css selector", ".words s")) >= 4.5
    assert not first.find_element("css selector", ".each").is_displayed()
    first.find_element("css selector", "summary").click()
    shown = first.find_elements("css selector", ".each span")
    assert shown[4].text.split() == [PARAGRAPH.split()[4], "93"] and shown[4].is_displayed()
    inside = browser.execute_script("return [...document.querySelectorAll('body *')].map(e => e.tagName.toLowerCase())")
    assert set(inside) <= OURS


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def contrast(driver, element):
    """Of a text and what is behind it, by the formula of WCAG 2."""
    colours = driver.execute_script(
        """
        let behind = arguments[0];
        while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
        return [getComputedStyle(arguments[0]).color, getComputedStyle(behind).backgroundColor];
        """,
        element,
    )
    light = []
    for colour in colours:
        parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)
