"""Texts for tests of what finds copies: unlike each other, and copies of them with small changes."""

import random

# Enough letters for words that are unlike each other, and the Chinese characters that are used most are in this range.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHINESE = [chr(code) for code in range(0x4E00, 0x5600)]


def english(generator: random.Random, n_words: int = 120) -> str:
    """Sentences of made-up words."""
    words = ("".join(generator.choices(LETTERS, k=generator.randint(2, 9))) for _ in range(n_words))
    return " ".join(word + "." * (generator.random() < 0.1) for word in words)


def chinese(generator: random.Random, n_characters: int = 250) -> str:
    """Characters without a space, with a full stop here and there."""
    return "".join(generator.choice(CHINESE) + "。" * (generator.random() < 0.05) for _ in range(n_characters))


def changed(text: str, generator: random.Random, lowest: float, highest: float) -> str:
    """The text with characters replaced until the similarity of its shingles is between the two."""
    characters = list(text)
    while True:
        characters[generator.randrange(len(characters))] = generator.choice("@#$%")
        similarity = jaccard(text, "".join(characters))
        if similarity < highest:
            assert similarity >= lowest, "one change was too much"
            return "".join(characters)


def jaccard(first: str, second: str) -> float:
    """The plain definition: of the sets of five characters, in lower case and with single spaces."""
    sets = []
    for text in (first, second):
        plain = " ".join(text.lower().split()).ljust(5)
        sets.append({plain[i : i + 5] for i in range(len(plain) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def planted(n: int, n_exact: int, n_near: int, lowest: float) -> tuple[list[str], list[str], list[str]]:
    """(n texts in English and n in Chinese that are unlike each other; copies of some to the letter; near ones of some)"""
    generator = random.Random(0)
    unlike = [english(generator) for _ in range(n)] + [chinese(generator) for _ in range(n)]
    exact = generator.sample(unlike, n_exact)
    return unlike, exact, [changed(text, generator, lowest, 0.95) for text in generator.sample(unlike, n_near)]
