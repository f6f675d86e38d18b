"""Model, data, evaluation and training loop of ``lowbit finetune`` and ``lowbit bench``."""
