"""Files of checkpoints: what ``torch.save`` wrote, folders of ``torch.distributed.checkpoint``, safetensors.

A file is written beside its place and then renamed, so that there is always a whole one.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from lowbit.convert import each

TREE = "lowbit_tree"  # in a safetensors file's metadata: the dicts and lists around its tensors, as JSON


def read(path):
    """What a checkpoint holds. Raises ``ValueError`` with the reason if it can't be read."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no {path}")
    try:
        if path.is_dir():
            return _read_folder(path)
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except ValueError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} can't be read as a checkpoint: {reason}") from error


def write(tree, path):
    """Write a checkpoint of the kind that the path's ending says: ``.safetensors``, none for a folder, else torch's."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.suffix:
        if path.exists():
            raise ValueError(f"{path} exists: choose another place")
        shutil.rmtree(partial, ignore_errors=True)
        _write_folder(tree, partial)
    elif path.suffix == ".safetensors":
        _write_safetensors(tree, partial)
    else:
        torch.save(tree, partial)
    os.replace(partial, path)


def _read_torch(path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if "torchao" not in str(error):
            raise
    import torchao.optim  # noqa: F401  lets torch read its tensors

    return torch.load(path, map_location="cpu", weights_only=True)


def _read_folder(path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    if not (path / ".metadata").is_file():
        raise ValueError(f"{path} is no folder of torch.distributed.checkpoint: it has no .metadata")
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(path, f"{folder}/whole.pt")
        tree = torch.load(f"{folder}/whole.pt", map_location="cpu", weights_only=True)
    return each(tree, lambda _, state_dict: _numbered(state_dict))


def _numbered(state_dict):
    """The state dict with numbers for keys where its groups have numbers, of which DCP makes text."""
    keys = {str(key): key for group in state_dict["param_groups"] for key in group["params"]}
    return {**state_dict, "state": {keys.get(key, key): state for key, state in state_dict["state"].items()}}


def _write_folder(tree, path):
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    with tempfile.TemporaryDirectory() as folder:
        torch.save(tree, f"{folder}/whole.pt")
        torch_save_to_dcp(f"{folder}/whole.pt", path)


def _read_safetensors(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tree = (file.metadata() or {}).get(TREE)
        if tree is None:
            raise ValueError(f"{path} holds tensors, but no optimizer's state dict: it was not written by lowbit")
        return _joined(json.loads(tree), file.get_tensor)


def _write_safetensors(tree, path):
    from safetensors.torch import save_file

    tensors = {}
    outline = json.dumps(_taken_apart(tree, tensors))
    save_file(tensors, path, metadata={TREE: outline})


def _taken_apart(tree, tensors, name=""):
    """The outline of a tree as JSON: a kind and, by kind, pairs of key and outline, outlines, a name, a value."""
    if isinstance(tree, dict):
        return ["dict", [[key, _taken_apart(value, tensors, f"{name}/{key}")] for key, value in tree.items()]]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, [_taken_apart(value, tensors, f"{name}/{i}") for i, value in enumerate(tree)]]
    if isinstance(tree, torch.Tensor):
        tensors[name.lstrip("/")] = tree.detach().contiguous().clone()
        return ["tensor", name.lstrip("/")]
    if tree is None or isinstance(tree, bool | int | float | str):
        return ["value", tree]
    raise ValueError(f"safetensors has no place for {name.lstrip('/')}, a {type(tree).__name__}: write a .pt file")


def _joined(outline, tensor):
    kind, value = outline
    if kind == "dict":
        return {key: _joined(x, tensor) for key, x in value}
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](_joined(x, tensor) for x in value)
    return tensor(value) if kind == "tensor" else value
