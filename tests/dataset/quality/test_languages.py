"""Names of languages. References: texts of which it is known."""

import pytest

from dataset.quality.languages import language_of

TEXTS = {
    "Latin letters": "The harbour lies in the north of the town, and most of the ships that come here are small.",
    "Chinese": "港口位于城市的北部，来到这里的大多数船只都很小。",
    "Japanese": "港は町の北にあり、ここに来る船のほとんどは小さい。",
    "Korean": "항구는 도시의 북쪽에 있으며 이곳에 오는 배는 대부분 작다.",
    "Cyrillic letters": "Гавань находится на севере города, и большинство судов небольшие.",
    "Devanagari letters": "बंदरगाह शहर के उत्तर में है",
    "no letters": "12 + 30 = 42",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_sentence_of_each(name):
    assert language_of(TEXTS[name]) == name


def test_nothing_and_half_a_surrogate_pair_have_no_letters():
    assert language_of("") == language_of(" \n") == language_of("\ud800") == "no letters"


def test_english_names_in_a_chinese_text_do_not_make_it_english():
    text = "Linux 是由 Linus Torvalds 于一九九一年首次发布的操作系统内核，许多发行版都使用它。"
    assert language_of(text) == "Chinese"
