"""What bytes a token stands for, for the two families of tokenizers where that does not depend on its neighbours."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The stand-ins that GPT-2's byte-level BPE writes bytes as: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes; b"" for special tokens and unknown ids. Filled on first use of each id."""

    def __init__(self, tokenizer: Tokenizer, *, byte_level: bool, special_ids: frozenset[int], added: dict[int, str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        self._special_ids = special_ids
        self._added = added

    def __missing__(self, token_id: int) -> bytes:
        value = b"" if token_id in self._special_ids else self.raw(token_id)
        self[token_id] = value
        return value

    def raw(self, token_id: int) -> bytes:
        """The same, but special tokens give their name."""
        token = self._added.get(token_id) or self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_ALPHABET[char] for char in token)
            except KeyError:  # an added token, kept as written
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def token_bytes(tokenizer: Tokenizer, spec: dict[str, Any]) -> TokenBytes | None:
    """The table for a tokenizer whose `tokenizer.json` is `spec`, or None when its decoder looks at neighbouring tokens.

    Known are byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and sentencepiece BPE with byte fallback (Llama 2, Mistral, Gemma).
    The latter's decoder strips the first space of a whole text; the table does not, as an answer continues its prompt.
    """
    added = {entry["id"]: entry["content"] for entry in spec.get("added_tokens", [])}
    special = frozenset(entry["id"] for entry in spec.get("added_tokens", []) if entry.get("special"))
    kinds = [step["type"] for step in _steps(spec.get("decoder"))]
    if kinds == ["ByteLevel"]:
        return TokenBytes(tokenizer, byte_level=True, special_ids=special, added=added)
    replaces_mark = any(
        step["type"] == "Replace" and step["pattern"] == {"String": SPACE_MARK} and step["content"] == " "
        for step in _steps(spec.get("decoder"))
    )
    if replaces_mark and "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return TokenBytes(tokenizer, byte_level=False, special_ids=special, added=added)
    return None
