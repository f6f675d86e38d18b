"""``lowbit convert`` and ``lowbit inspect``: checkpoints on disk."""
