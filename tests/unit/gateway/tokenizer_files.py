"""Small real tokenizers, written the way a checkpoint's directory has them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Hello world, how are you today? I am fine, thank you. STOP here. one two three four five",
    "naïve café déjà vu 你好 世界 emoji 😀 🎉 👩‍👩‍👧‍👦",
] * 4
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(directory: Path) -> Path:
    """GPT-2's kind: every byte is a token, so a character may be split over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    return _write(tokenizer, directory, {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}})


def sentencepiece(directory: Path) -> Path:
    """Llama 2's kind: a mark for spaces, and bytes as `<0xAB>` for what the vocabulary lacks."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ["▁", *"TheiscaptolfFrnPdukbwjmvryzgHSO.,?123", "é", "▁the", "▁capital", "▁is", "▁Paris", "▁of"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "t"), ("▁", "i")]
    vocabulary |= {"▁t": len(vocabulary), "▁i": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _write(tokenizer, directory, {"bos_token": "<s>", "eos_token": "</s>"})


def word_piece(directory: Path) -> Path:
    """BERT's kind: what a token prints depends on its neighbours, so it goes through the ring."""
    words = ["[UNK]", "the", "capital", "of", "france", "is", "paris", "##s", "##ing", ".", ",", "go", "'", "don", "t"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _write(tokenizer, directory, {})


def _write(tokenizer: Tokenizer, directory: Path, config: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory
