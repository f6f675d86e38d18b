"""Where rows of data come from: files, folders, datasets on the Hub."""

import json
import re
from pathlib import Path

from lowbit.finetune.errors import UserError

KINDS = (".json", ".jsonl", ".parquet")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read(spec):
    """Yield ``(row, where)`` of a data source; ``where`` names the row in an error."""
    if spec == "builtin":
        from lowbit.finetune.builtin import records

        rows = records()
        return _numbered(rows, "built-in data")
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.exists():
        return _file(path)
    if path.suffix in KINDS or not HUB_ID.fullmatch(spec):
        raise UserError(f"{spec}: there is no such file")
    return _numbered(_hub(spec), spec)


def _numbered(rows, name):
    return ((row, f"{name}: record {i}") for i, row in enumerate(rows, 1))


def _folder(path):
    """Rows of a folder that ``datasets`` saved, or of all its data files by name."""
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        try:
            return _numbered(_train_split(_datasets(path).load_from_disk(str(path)), path), path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} can't be read as a saved dataset: {first_line(error)}") from error
    files = sorted(file for file in path.iterdir() if file.suffix in KINDS)
    if not files:
        raise UserError(f"{path} holds no {', '.join(KINDS)} file: give the folder of the data")
    return (row for file in files for row in _file(file))


def _file(path):
    if path.suffix == ".parquet":
        return _numbered(_parquet(path), path)
    text = read_text(path)
    if path.suffix == ".jsonl" or text.lstrip()[:1] == "{":
        lines = ((i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip())
        return ((parse(line, path, i), f"{path}: line {i}") for i, line in lines)
    rows = parse(text, path)
    if not isinstance(rows, list):
        raise UserError(f"{path} is not a list of records: give a JSON list, or JSON lines")
    return _numbered(rows, path)


def read_text(path):
    """The text of a UTF-8 file; raises :class:`UserError`."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): give a JSON file") from error
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error


def parse(text, path, first_line=1):
    """JSON text as an object; an error names line and column. ``first_line`` is the line of the file it begins at."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{path} is not JSON at line {line}, column {error.colno}: {error.msg}") from error


def _parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a parquet file: {first_line(error)}") from error


def _datasets(name):
    """The package ``datasets``, which only what it saved and the Hub need."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name} is no JSON file here, and to look further datasets is missing: pip install 'lowbit[finetune]'"
        ) from error
    return datasets


def _hub(name):
    """Rows of the split ``train`` of a dataset on the Hugging Face Hub."""
    datasets = _datasets(name)
    try:
        found = datasets.load_dataset(name)
    except Exception as error:  # of many libraries: network, authentication, format
        raise UserError(f"{name} is no file or folder here, and not on the Hub ({first_line(error)})") from error
    return _train_split(found, name)


def _train_split(found, name):
    """A dataset, or the split ``train`` of several."""
    if not isinstance(found, dict):
        return found
    if "train" not in found:
        raise UserError(f"{name} has the splits {', '.join(found)}, and no 'train': save one as a file and give that")
    return found["train"]


def first_line(error):
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
