"""One run in several processes, as torchrun starts them: FSDP2 shards the model, each takes its part of every batch.

In a single process every function here does what is right for one.
"""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lowbit.finetune.errors import UserError


def launched():
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def first():
    """Whether this process is the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def count():
    """How many processes take part."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    """Number of this process among them, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def together(options):
    """Join the other processes that torchrun started, if it did, each with a device of its own.

    After an error they are left without a word: torchrun ends those that wait for this one.
    """
    if launched() == 1:
        yield
        return
    if options.batch_size < launched():
        raise UserError(f"--batch-size is {options.batch_size}: give at least {launched()}, one for each process")
    if options.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device is {options.device}: give cpu or cuda, of which each process takes its own")
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    yield
    dist.destroy_process_group()


def shard(model, device_type, replicas):
    """Shard the parameters of a model over all processes, in place: each layer is gathered when it is needed.

    With several ``replicas`` the processes are cut into that many groups, each with the whole model (HSDP). The model
    may be on the CPU: its parts come to the device layer by layer. See ``torch.distributed.fsdp.fully_shard``.
    """
    if count() == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if count() % replicas:
        raise UserError(f"--replicas is {replicas}: give a number that divides the {count()} processes")
    shape = (replicas, count() // replicas) if replicas > 1 else (count(),)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def layers(model):
    """The layers of a model: its longest ``ModuleList``; empty if there is none."""
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len, default=())


def share(indices):
    """This process's part of a micro-batch; none of it may be left if it is short."""
    return shares(indices)[rank()]


def shares(indices):
    """The parts of a micro-batch, one for each process."""
    return [indices[start :: count()] for start in range(count())]


def add_up(x):
    """The sum of a tensor over all processes, in place."""
    if count() > 1:
        dist.all_reduce(x)
    return x


def gather(value):
    """A value of every process, as a list."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def wait():
    """Wait for all processes."""
    if count() > 1:
        dist.barrier()


def whole_weights(model):
    """The state dict of a sharded model, gathered on the CPU of process 0, and None elsewhere."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return state if rank() == 0 else None


def save_optimizer(model, optimizer, folder):
    """Save the state of an optimizer into a folder, each process its shards (``torch.distributed.checkpoint``)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def load_optimizer(model, optimizer, saved):
    """Load what :func:`save_optimizer` left in a folder, or an optimizer's whole ``state_dict()``.

    Neither depends on the number of processes.
    """
    if isinstance(saved, dict) and count() == 1:
        return optimizer.load_state_dict(saved)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    if isinstance(saved, dict):
        choice = StateDictOptions(full_state_dict=True)
        return set_optimizer_state_dict(model, optimizer, _named(model, saved), options=choice)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=saved)
    return set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _named(model, saved):
    """An optimizer's state dict by the names of parameters instead of their numbers."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    groups = [group | {"params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[i]: state for i, state in saved["state"].items()}, "param_groups": groups}
