"""Text <-> tokens: the tokenizer, incremental detokenization, chat templates and their sandbox. No tensors."""
