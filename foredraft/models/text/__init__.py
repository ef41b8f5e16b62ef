"""From what people write to token ids and back: tokenizers, chat templates, grammars."""
