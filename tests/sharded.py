"""What four processes of gloo do together for ``test_sharding.py``: one world, meshes inside it."""

import copy
import logging
import math
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowbit
from lowbit.distributed import local, whole

WORLD = 4
# an embedding, fewer rows than processes, experts, a matrix, a norm, ragged rows, a wide matrix
SHAPES = ((257, 64), (3, 128), (8, 64, 64), (100, 96), (96,), (7, 40), (64, 256))
GATES = 9  # processes that share it
GATE = ((8, 128), (257, 64), (8,))  # the gate of eight experts, an embedding, a norm
MESHES = {
    "FSDP x 2": ([0, 1], [Shard(0)]),
    "FSDP x 3": ([0, 1, 2], [Shard(0)]),
    "FSDP x 4": ([0, 1, 2, 3], [Shard(0)]),
    "HSDP 2 x 2": ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
    "TP x 2": ([0, 1], [Shard(1)]),
    "FSDP x TP": ([[0, 1], [2, 3]], [Shard(0), Shard(1)]),
}
CHAINS = (
    ([0, 1], [0]), ([0, 1], [0, 1, 2, 3]), ([0, 1], [0, 1, 2], [0, 1, 2, 3], [0]), ([0, 1, 2, 3], [0, 1, 2], [0]),
)  # fmt: skip
OPTIONS = ({"state": "8bit"}, {"state": "4bit"}, {"state": "8bit", "weights": "24bit"}, {"state": "12bit"})


class Net(torch.nn.Module):
    """Parameters of some shapes."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.weights = torch.nn.ParameterList(random(shapes, 0))


def random(shapes, seed):
    """The same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def optimizer_of(params, options, backend="eager", fp32=()):
    """An optimizer that keeps fp32 state for the parameters at some places."""
    groups = [{"params": [p], **({"state": "fp32"} if i in fp32 else {})} for i, p in enumerate(params)]
    return lowbit.AdamW(groups, lr=1e-2, weight_decay=0.1, min_numel=0, backend=backend, **options)


def cut_blocks(placements):
    """Places of the shapes whose columns two processes would share inside a block: they keep fp32 state."""
    return [i for i, s in enumerate(SHAPES) if Shard(1) in placements and s[1:] and math.prod(s[1:]) // 2 % 32]


def take_steps(optimizer, params, steps, mesh=None, placements=None):
    """Steps with the gradients of their numbers."""
    for step in steps:
        for p, g in zip(params, random([p.shape for p in params], step + 1), strict=True):
            p.grad = distribute_tensor(g, mesh, placed(placements, g), src_data_rank=None) if mesh else g
        optimizer.step()


def placed(placements, x):
    """Placements that a tensor can have: a vector has no columns."""
    return [Replicate() if p == Shard(1) and x.ndim < 2 else p for p in placements]


def parameters_on(mesh, placements):
    """The parameters of a net, sharded."""
    values = [distribute_tensor(p.data, mesh, placed(placements, p), src_data_rank=None) for p in Net().weights]
    return [torch.nn.Parameter(x) for x in values]


def same(x, y):
    """Bit-equal, wherever the parts are; every process of the mesh takes part."""
    x, y = (whole(t).contiguous() for t in (x, y))
    return x.dtype == y.dtype and x.shape == y.shape and bytes(x.view(torch.uint8).numpy()) == bytes(
        y.view(torch.uint8).numpy()
    ) if x.ndim else torch.equal(x, y)  # fmt: skip


def differences(ps, a, qs, b):
    """Names of what is not bit-equal between two optimizers."""
    found = []
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
        if not same(p, q):
            found.append(f"weight {i}")
        if a.state[p].keys() != b.state[q].keys():
            found.append(f"keys {i}: {sorted(a.state[p])} {sorted(b.state[q])}")
            continue
        found += [f"{name} {i}" for name in a.state[p] if not same(a.state[p][name], b.state[q][name])]
    return found


def reference(options, steps, fp32=(), shapes=SHAPES):
    """Parameters and optimizer of one process after some steps."""
    params = list(Net(shapes).weights)
    optimizer = optimizer_of(params, options, fp32=fp32)
    take_steps(optimizer, params, range(steps))
    return params, optimizer


def check_meshes(rank, folder):
    """Twenty steps on each mesh are those of one process."""
    for options in OPTIONS:
        for name, (ranks, placements) in MESHES.items():
            qs, b = reference(options, 20, cut_blocks(placements))
            mesh = DeviceMesh("cpu", ranks)
            if mesh.get_coordinate() is None:
                continue
            params = parameters_on(mesh, placements)
            optimizer = optimizer_of(params, options)
            take_steps(optimizer, params, range(20), mesh, placements)
            found = differences(params, optimizer, qs, b)
            assert not found, f"{options} on {name}, rank {rank}: {found}"
        dist.barrier()


def check_kernel(rank, folder):
    """The kernel, in the interpreter, numbers elements of shards as the eager backend does."""
    for name in ("FSDP x 3", "TP x 2"):
        ranks, placements = MESHES[name]
        qs, b = reference(OPTIONS[0], 2, cut_blocks(placements))
        mesh = DeviceMesh("cpu", ranks)
        if mesh.get_coordinate() is None:
            continue
        params = parameters_on(mesh, placements)
        optimizer = optimizer_of(params, OPTIONS[0], backend="triton")
        take_steps(optimizer, params, range(2), mesh, placements)
        found = differences(params, optimizer, qs, b)
        assert not found, f"kernel on {name}, rank {rank}: {found}"


def sharded_net(mesh, options, shapes=SHAPES):
    """A net under FSDP2, or whole in one process, and its optimizer."""
    net = Net(shapes)
    if mesh is not None:
        fully_shard(net, mesh=mesh)
    return net, optimizer_of(list(net.weights), options)


def check_resume(rank, folder):
    """Saved by DCP on one mesh, loaded on others."""
    for number, options in enumerate(OPTIONS[:3]):
        for place, chain in enumerate(CHAINS):
            resume_over(rank, f"{folder}/{number}-{place}", options, chain, [4] + [2] * (len(chain) - 1), SHAPES)


def check_gate(rank, folder):
    """Nine processes and eight rows: the last process holds nothing of the gate, and what it saves is whole."""
    for number, options in enumerate(OPTIONS[:3]):
        chain = (range(GATES), [0, 1, 2, 3], [0])
        resume_over(rank, f"{folder}/{number}", options, chain, [20, 2, 2], GATE)


def resume_over(rank, path, options, chain, counts, shapes):
    """So many steps on the ranks of each link, saved there and loaded on the next: as if one had never stopped."""
    done = 0
    for i, (ranks, count) in enumerate(zip(chain, counts, strict=True)):
        mesh = DeviceMesh("cpu", list(ranks))
        if mesh.get_coordinate() is not None:
            net, optimizer = sharded_net(mesh, options, shapes)
            group = mesh.get_group()
            if i:
                load(net, optimizer, f"{path}-{i - 1}", group)
            take_steps(optimizer, list(net.weights), range(done, done + count), mesh, [Shard(0)])
            qs, b = reference(options, done + count, shapes=shapes)
            found = differences(list(net.weights), optimizer, qs, b)
            assert not found, f"{options} over {chain} at {ranks}, rank {rank}: {found}"
            state = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer)}
            dcp.save(state, checkpoint_id=f"{path}-{i}", process_group=group)
        done += count
        dist.barrier()


def load(net, optimizer, path, group):
    """Model and optimizer from a distributed checkpoint; a fresh optimizer asked for its state stays fresh."""
    state = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer)}
    assert all(s["step"].item() == 0 for s in optimizer.state.values())
    dcp.load(state, checkpoint_id=path, process_group=group)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optim"])


def check_full(rank, folder):
    """A full state dict of one process goes into shards, by broadcast from rank 0 and by each process, and back."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    for options in OPTIONS[:3]:
        qs, b = reference(options, 3)
        net, _ = sharded_net(None, options)
        for q, p in zip(qs, net.weights, strict=True):
            p.data.copy_(q.data)
        single = optimizer_of(list(net.weights), options)
        single.load_state_dict(b.state_dict())
        saved = get_optimizer_state_dict(net, single)
        model = {name: x.clone() for name, x in net.state_dict().items()}
        for broadcast in (True, False):
            other, optimizer = sharded_net(mesh, options)
            if broadcast:
                choice = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(other, model if rank == 0 else {}, options=choice)
                set_optimizer_state_dict(other, optimizer, saved if rank == 0 else {}, options=choice)
            else:
                for p, q in zip(other.weights, qs, strict=True):
                    p.data.copy_(distribute_tensor(q.data, mesh, [Shard(0)], src_data_rank=None))
                optimizer.load_state_dict(b.state_dict())
            take_steps(optimizer, list(other.weights), range(3, 5), mesh, [Shard(0)])
            rs, c = reference(options, 5)
            found = differences(list(other.weights), optimizer, rs, c)
            assert not found, f"{options}, broadcast {broadcast}, rank {rank}: {found}"
            full = get_optimizer_state_dict(other, optimizer, options=StateDictOptions(full_state_dict=True))
            for i, r in enumerate(rs):
                assert all(same(full["state"][f"weights.{i}"][name], x) for name, x in c.state[r].items())


def check_decode(rank, folder):
    """``lowbit.decode`` gives moments placed like the parameter."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    qs, b = reference(OPTIONS[0], 2)
    net, optimizer = sharded_net(mesh, OPTIONS[0])
    take_steps(optimizer, list(net.weights), range(2), mesh, [Shard(0)])
    for p, q in zip(net.weights, qs, strict=True):
        for x, y in zip(lowbit.decode(optimizer, p), lowbit.decode(b, q), strict=True):
            assert x.placements == p.placements and same(x, y) and local(x).dtype == torch.float32


def check_flat(rank, folder):
    """FSDP1 is refused when the optimizer is built."""
    for original in (True, False):
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        net = FullyShardedDataParallel(net, use_orig_params=original, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="fully_shard"):
            lowbit.AdamW8bit(net.parameters())


def check_replicas(rank, folder):
    """DDP x 2 and x 4: replicas that see different parts of a batch stay equal, and equal one process."""
    for size in (2, 4):
        group = dist.new_group(list(range(size)))
        for options in OPTIONS[:3] if rank < size else ():
            replicate(rank, size, group, options)


def replicate(rank, size, group, options):
    """Twenty steps of replicas in a group of so many processes."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 257), torch.nn.LayerNorm(257), torch.nn.Linear(257, 32))
    net = net.to(torch.bfloat16)
    alone, part = copy.deepcopy(net), 8 // size
    replica = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    ours, theirs = (lowbit.AdamW(m.parameters(), lr=1e-2, min_numel=0, **options) for m in (replica, alone))
    for step in range(20):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        replica(x[part * rank : part * (rank + 1)]).square().sum().backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            q.grad = p.grad.clone()
        ours.step(), theirs.step()
        ours.zero_grad()
    found = differences(list(net.parameters()), ours, list(alone.parameters()), theirs)
    assert not found, found
    for p in net.parameters():
        gathered = [torch.empty_like(p) for _ in range(size)]
        dist.all_gather(gathered, p.detach(), group=group)
        assert all(same(x, p) for x in gathered)


CHECKS = {"meshes": check_meshes, "kernel": check_kernel, "resume": check_resume, "full": check_full}
CHECKS |= {"decode": check_decode, "flat": check_flat, "replicas": check_replicas}


def run(rank, check, folder, world):
    """One process of a world."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    place, limit = f"file://{folder}/init", timedelta(seconds=120)  # so that waiting for nobody is an error
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=limit)
    try:
        check(rank, folder)
    finally:
        dist.destroy_process_group()
