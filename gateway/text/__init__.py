"""Text on the way in and out of a model: tokenizers, chat templates, incremental detokenizing, stop strings."""
