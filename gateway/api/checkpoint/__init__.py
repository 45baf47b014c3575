"""Checkpoints: where a model's weights are, what they are, and the tokenizer that belongs to them.

Only headers are read here (safetensors, GGUF); weights are the engines' to load. Everything derived is kept in the cache
directory under the checkpoint's digest. Every function raises `YardError(INVALID)` that names the file, what is wrong with it
and the fix.
"""

from gateway.api.checkpoint.checkpoint import Checkpoint, open_checkpoint
from gateway.api.checkpoint.source import resolve
from gateway.api.checkpoint.tokenizer import tokenizer_dir

__all__ = ["Checkpoint", "open_checkpoint", "resolve", "tokenizer_dir"]
