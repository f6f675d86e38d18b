"""The benchmark: one fine-tune per optimizer, one table."""
