"""Our own decoder for llama-shaped checkpoints: Llama, SmolLM, Mistral, Qwen2, Qwen3."""
