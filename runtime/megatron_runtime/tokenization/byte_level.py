"""The alphabet of byte-level BPE: each byte has a printable character (GPT-2, Radford et al. 2019)."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _alphabet()


def piece_to_bytes(piece: str) -> bytes:
    """Return the bytes that a vocabulary entry stands for; one outside the alphabet stands for its own UTF-8."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()
