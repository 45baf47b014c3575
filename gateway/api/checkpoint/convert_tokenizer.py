"""`python -m gateway.api.checkpoint.convert_tokenizer CHECKPOINT DIRECTORY`: write a checkpoint's tokenizer into a directory."""

from __future__ import annotations

import sys
from pathlib import Path


def convert(checkpoint: Path, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, by transformers' own readers."""
    from transformers import AutoTokenizer

    if checkpoint.is_file():
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.parent), gguf_file=checkpoint.name, local_files_only=True)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
    tokenizer.save_pretrained(str(directory))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
