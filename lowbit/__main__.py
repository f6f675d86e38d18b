"""``lowbit`` and ``python -m lowbit``."""

import importlib.util
import sys

# Of the extra ``finetune``; the library itself needs torch alone.
NEEDED = ("transformers", "tokenizers", "typer", "rich", "matplotlib", "numpy", "psutil")


def main():
    """The command line, or one line that says how to install what it needs."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"lowbit: {', '.join(missing)} missing: pip install 'lowbit[finetune]'", file=sys.stderr)
        sys.exit(2)
    from lowbit.cli import main as run

    run()


if __name__ == "__main__":
    main()
