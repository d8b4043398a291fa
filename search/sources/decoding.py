"""The encoding of a text: UTF-8 or what its byte order mark says, else what charset-normalizer finds.

    encoding, errors = encoding_of(lines)

A file that is UTF-8 but for single lines stays UTF-8: its bad bytes are decoded as lone surrogates, which
`fields` then refuses where they are.
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
"""Bytes of lines that are not UTF-8, by which the encoding is found."""


class Encoding(NamedTuple):
    """How to decode: arguments of `bytes.decode`."""

    name: str
    errors: str = "strict"


def encoding_of(lines: Iterable[bytes]) -> Encoding:
    """Return the encoding of these lines; raises ValueError for what is no text."""
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
    # Windows' Latin is what unlabelled Western texts are in; of a few letters alone the library's first
    # choice is arbitrary among the encodings that fit them.
    found = from_bytes(sample, cp_isolation=["cp1252"]).best() or from_bytes(sample).best()
    if found is None:
        raise ValueError("no text in any known encoding: a binary file?")
    return Encoding(found.encoding)
