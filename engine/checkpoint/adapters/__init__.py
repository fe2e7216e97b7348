"""Reads adapters (LoRA) as PEFT writes them: adapter_config.json and adapter_model.safetensors."""
