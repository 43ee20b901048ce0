"""Names of languages. References: texts of which it is known, and corpora of one kind each."""

import json

import pytest

from dataset.quality import languages
from dataset.quality.languages import RANGES, language_of
from tests.helpers import SHARED, needs_shared

TEXTS = {
    "English": "The harbour lies in the north of the town, and most of the ships that come here are small.",
    "German": "Der Hafen liegt im Norden der Stadt, und die meisten Schiffe, die hier ankommen, sind klein.",
    "French": "Le port se trouve dans le nord de la ville, et la plupart des navires qui arrivent ici sont petits.",
    "Spanish": "El puerto se encuentra en el norte de la ciudad y los barcos que llegan aquí son pequeños.",
    "Portuguese": "O porto fica no norte da cidade e os navios que chegam aqui são pequenos, mas não são poucos.",
    "Italian": "Il porto si trova nel nord della città e le navi che arrivano qui non sono molto grandi.",
    "Dutch": "De haven ligt in het noorden van de stad en de schepen die hier aankomen zijn niet groot.",
    "Polish": "Port leży na północy miasta i większość statków, które tu przypływają, nie jest duża.",
    "Turkish": "Liman şehrin kuzeyinde bulunur ve buraya gelen gemiler çok büyük değildir, ama bir liman için yeterli.",
    "Chinese": "港口位于城市的北部，来到这里的大多数船只都很小。",
    "Japanese": "港は町の北にあり、ここに来る船のほとんどは小さい。",
    "Korean": "항구는 도시의 북쪽에 있으며 이곳에 오는 배는 대부분 작다.",
    "Cyrillic letters": "Гавань находится на севере города, и большинство судов небольшие.",
    "Greek": "Το λιμάνι βρίσκεται στο βόρειο τμήμα της πόλης.",
    "Arabic letters": "يقع الميناء في شمال المدينة ومعظم السفن صغيرة.",
    "Hebrew": "הנמל נמצא בצפון העיר ורוב האוניות קטנות.",
    "Thai": "ท่าเรืออยู่ทางเหนือของเมือง",
    "Devanagari (Hindi and others)": "बंदरगाह शहर के उत्तर में है",
    "code": "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n    return width * height\n",
    "no letters": "12 + 30 = 42",
    "other in Latin letters": "Satama sijaitsee kaupungin pohjoisosassa, ja useimmat alukset ovat pieniä.",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_sentence_of_each(name):
    assert language_of(TEXTS[name]) == name


def test_programs_of_other_languages_are_code():
    assert language_of('#include <stdio.h>\nint main(void) {\n  printf("hello\\n");\n  return 0;\n}\n') == "code"
    assert language_of("const f = (x) => {\n  return x.map((y) => y + 1);\n};\n") == "code"


def test_nothing_and_half_a_surrogate_pair_have_no_letters():
    assert language_of("") == language_of(" \n") == language_of("\ud800") == "no letters"


def test_english_names_in_a_chinese_text_do_not_make_it_english():
    assert (
        language_of("Linux 是由 Linus Torvalds 于一九九一年首次发布的操作系统内核，许多发行版都使用它。") == "Chinese"
    )


def test_the_ranges_ascend_and_hold_the_letters_of_ascii():
    """Reference: str.isalpha."""
    begins = [begin for begin, _ in RANGES]
    assert begins == sorted(set(begins))
    for code in range(128):
        assert (languages.writing_system(chr(code)) is not None) == chr(code).isalpha()


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize(
    "corpus, name, least",
    [
        ("en_wiki", "English", 0.97),
        ("en_novels", "English", 1.0),
        ("zh_wiki", "Chinese", 0.99),
        ("zh_laws", "Chinese", 1.0),
        ("zh_lctt_tech", "Chinese", 0.97),
        ("code_python", "code", 0.9),
    ],
)
def test_the_documents_of_a_corpus_have_its_name(corpus, name, least):
    with open(SHARED / "corpora" / f"{corpus}.valid.jsonl", encoding="utf-8") as file:
        found = [language_of(json.loads(line)["text"]) for line in file]
    assert found.count(name) >= least * len(found)
