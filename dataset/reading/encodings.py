"""In which encodings a file may be that is not UTF-8, and the command that converts it."""

import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

from common.errors import optional_package
from dataset.reading.file_kinds import kind_of
from dataset.reading.streams import open_stream

# {codec of Python: how it is called}
MULTI_BYTE = {"gb18030": "GBK", "big5hkscs": "Big5", "cp932": "Shift-JIS", "euc_jp": "EUC-JP", "cp949": "EUC-KR"}
# Of equally likely ones the first is named first.
ONE_BYTE = "cp1252 latin_1 cp1250 iso8859_2 cp1251 koi8_r koi8_u cp866 iso8859_5 cp1253 iso8859_7 cp1254 cp1255 cp1256 cp1257 cp1258 cp874 cp850"
# Maximum share of what charset-normalizer finds odd, such as mixed scripts: one-byte encodings read nearly everything.
MAX_MESS = 0.3
# Bytes of each of three parts of a file that are looked at
PART_BYTES = 1 << 18
# From one such byte to another: no encoding has them within a character.
WHOLE = re.compile(rb"[\0-/].*[\0-/]", re.DOTALL)


def how_to_convert(path: Path) -> str:
    """The encodings that read a sample of a file without a fault, the likeliest first, each with its first characters beyond
    ASCII, and a command; "" for a file that is mostly UTF-8, and where none does."""
    readings = _readings(_sample(path))
    if not readings:
        return ""
    names: dict[str, list[str]] = {}
    for name, text in readings.items():
        at = next((i for i, character in enumerate(text) if not character.isascii()), 0)
        excerpt = text[max(at - 4, 0) : at + 12]
        names.setdefault(excerpt, []).append(f"{name} ({MULTI_BYTE[name]})" if name in MULTI_BYTE else name)
    shown = ", ".join(f"{excerpt!r} in {' or '.join(alike)}" for excerpt, alike in names.items())
    command = conversion_command(path, next(iter(readings)))
    return f"it reads as {shown}; convert the file from the right one, as by: {command}"


def _sample(path: Path) -> bytes:
    """Lines beyond ASCII from the beginning, middle and end of a file; of a compressed or small one from the beginning."""
    lines = []
    with open_stream(path, kind_of(path).compression) as (stream, _):
        size = path.stat().st_size
        begins = (0, size // 2, size - PART_BYTES) if stream.seekable() and size > PART_BYTES else (0,)
        for begin in begins:
            if begin:
                stream.seek(begin)
            part = stream.read(PART_BYTES)
            # The ends of a file cut no character.
            whole = WHOLE.search(b"\n" * (begin == 0) + part + b"\n" * (len(part) < PART_BYTES))
            lines += whole[0].split(b"\n") if whole else []
    return b"\n".join(line for line in lines if not line.isascii())


def _readings(sample: bytes) -> dict[str, str]:
    """{encoding: the sample as text}, the likeliest first. Empty if it is mostly UTF-8."""
    in_utf8 = sample.decode("utf-8", "replace")
    n_beyond_ascii = sum(not character.isascii() for character in in_utf8)
    if n_beyond_ascii >= 2 * in_utf8.count("\ufffd"):
        return {}
    library = optional_package("charset_normalizer", "to name the encodings of a text", "charset-normalizer")
    # One call for each: a call with several leaves out those that are like one that it has refused.
    matches: list[Any] = []
    for name in (*MULTI_BYTE, *ONE_BYTE.split()):
        most = math.inf if name in MULTI_BYTE else MAX_MESS
        matches += library.from_bytes(sample, cp_isolation=[name], threshold=most, enable_fallback=False)
    # By their mess, and by how well the frequencies of letters fit one of some forty languages. Of two-byte characters some
    # have two bytes beyond ASCII; accents may be alone.
    is_one_byte = not re.search(rb"[\x80-\xff]{2}", sample)
    matches.sort(key=lambda match: (is_one_byte and match.encoding in MULTI_BYTE, match))
    return {match.encoding: str(match) for match in matches}


def conversion_command(path: Path, encoding: str) -> str:
    """Command that converts a file to UTF-8, with the suffix that determines its kind."""
    kind = kind_of(path)
    source = str(path.with_suffix("") if kind.compression else path)
    source = f'"{source}"' if os.name == "nt" else shlex.quote(source)
    # newline='': line ends within a document stay.
    command = (
        f"python -c \"import sys; open('converted{kind.suffix}', 'w', encoding='utf-8', newline='')"
        f".write(open(sys.argv[1], encoding='{encoding}', newline='').read())\" {source}"
    )
    return f"decompress it, then {command}" if kind.compression else command
