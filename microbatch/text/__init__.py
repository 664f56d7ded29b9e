"""Text to token ids and back: tokenizers (``core.ports.Tokenizer``), incremental text, stop texts, chat templates."""
