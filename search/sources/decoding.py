"""The encoding of a text: UTF-8, or what its byte order mark says, else charset-normalizer's guess.

A file with single bad lines stays UTF-8: bad bytes become lone surrogates, which `fields` then rejects.
"""

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from charset_normalizer import from_bytes

UTF8 = "utf-8"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 64 * 1024
"""Bytes of lines that are not UTF-8, for the guess."""


class Encoding(NamedTuple):
    """How to decode: arguments of `bytes.decode`."""

    name: str
    errors: str = "strict"


def encoding_of(lines: Iterable[bytes]) -> Encoding:
    """Return the encoding of these lines. Raises ValueError for binary data."""
    valid = first = 0
    sample = bytearray()
    for number, line in enumerate(lines):
        if number == 0:
            for mark, name in _MARKS:
                if line.startswith(mark):
                    return Encoding(name)
        if b"\0" in line:
            raise ValueError(
                "a binary file? It has zero bytes, as has UTF-16 without a mark: save it as UTF-8"
            )
        if line.isascii():
            continue
        try:
            line.decode()
            valid += 1
        except UnicodeDecodeError:
            first += 1
            if len(sample) < _SAMPLE:
                sample += line[:_SAMPLE]
    if not sample:
        return Encoding(UTF8)
    return Encoding(UTF8, "surrogateescape") if valid > first else _guess(bytes(sample))


def _guess(sample: bytes) -> Encoding:
    # Unlabelled Western text is usually Windows' Latin. With few letters, the library's first choice is
    # arbitrary.
    found = from_bytes(sample, cp_isolation=["cp1252"]).best() or from_bytes(sample).best()
    if found is None:
        raise ValueError("no text in any known encoding: a binary file?")
    return Encoding(found.encoding)
