"""FSDP2 as its users have it, for ``test_sharding.py``: a transformers model under every policy, saved and resumed."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded import differences
from tiny import llama
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import lowbit
from lowbit.distributed import is_dtensor, local, whole

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
POLICIES = {
    "resharded": {},
    "kept whole": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


def sharded_llama(ranks, dtype=torch.bfloat16, **policy):
    """A small Llama with tied embeddings, each layer a unit of FSDP2, and its optimizer."""
    model = llama(dtype, tie_word_embeddings=True)
    mesh = DeviceMesh("cpu", ranks)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model, lowbit.AdamW8bit(model.parameters(), lr=1e-2, weights="24bit", min_numel=0, backend="eager")


def train(model, optimizer, rank, steps):
    """Steps on a batch of random tokens, another on each process; returns the losses of this one."""
    ids = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_policies(rank, folder):
    """Where FSDP2 keeps parameters between steps changes nothing; state is where they are; mixed precision trains."""
    found = {}
    for name, policy in POLICIES.items():
        model, optimizer = sharded_llama([0, 1, 2, 3], **policy)
        found[name] = (train(model, optimizer, rank, 4), list(model.parameters()), optimizer)
        for p, state in optimizer.state.items():
            assert all(is_dtensor(x) and x.device == p.device for key, x in state.items() if key != "step")
    losses, params, optimizer = found.pop("resharded")
    assert losses[-1] < losses[0]
    assert found.pop("mixed")[0] != losses  # its gradients are summed in fp32
    for name, (others, qs, theirs) in found.items():
        assert others == losses and not differences(params, optimizer, qs, theirs), name
    model, optimizer = sharded_llama([0, 1, 2, 3], torch.float32, **POLICIES["mixed"])
    losses = train(model, optimizer, rank, 4)
    assert losses[-1] < losses[0] and all(p.dtype == torch.float32 for p in model.parameters())


def check_flattened(rank, folder):
    """Saved in the background under flat names, loaded by a fresh optimizer as if never stopped."""
    model, optimizer = sharded_llama([0, 1, 2, 3])
    train(model, optimizer, rank, 3)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    assert all("." in name and not isinstance(value, dict) for name, value in state["optim"].items())
    dcp.async_save(state, checkpoint_id=folder + "/flat").result()
    train(model, optimizer, rank, 2)
    other, fresh = sharded_llama([0, 1, 2, 3])
    state = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, fresh, options=FLAT)}
    dcp.load(state, checkpoint_id=folder + "/flat")
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, fresh, state["optim"], options=FLAT)
    train(other, fresh, rank, 2)
    choice = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=choice).get("state")
    for name, p in model.named_parameters():
        for key, x in optimizer.state[p].items():
            x = whole(x)  # all take part; the first has the state dict
            assert rank or (torch.equal(full[name][key], x) and not is_dtensor(full[name][key]))
    found = differences(list(model.parameters()), optimizer, list(other.parameters()), fresh)
    assert not found, found


def check_sizes(rank, folder):
    """Small and uneven parameters: the whole parameter decides its format, wherever it is cut."""
    shapes = ((96, 64), (257, 64), (64, 64), (63, 65), (33, 257))  # 6144 elements, uneven rows, 4096, 4095, wide
    for ranks in ([0, 1], [0, 1, 2, 3]):
        values = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
        gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(8)) for shape in shapes]
        qs = [torch.nn.Parameter(x.clone()) for x in values]
        mesh = DeviceMesh("cpu", ranks)
        if mesh.get_coordinate() is None:
            continue
        ps = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)) for x in values]
        ours, whole = (lowbit.AdamW8bit(params, lr=1e-2, backend="eager") for params in (ps, qs))
        for p, q, g in zip(ps, qs, gradients, strict=True):
            p.grad, q.grad = distribute_tensor(g, mesh, [Shard(0)], src_data_rank=None), g
        ours.step(), whole.step()
        kept = ["exp_avg_scale" in whole.state[q] for q in qs]
        assert kept == [True, True, True, False, True]
        assert not differences(ps, ours, qs, whole)


def check_parts(rank, folder):
    """The shards of one process, saved without DCP, are no state of another number of processes, nor of one."""
    model, optimizer = sharded_llama([0, 1, 2, 3])
    train(model, optimizer, rank, 1)
    state = optimizer.state_dict()
    state["state"] = {i: {k: local(x) for k, x in s.items()} for i, s in state["state"].items()}
    mesh = DeviceMesh("cpu", [0, 1])
    if mesh.get_coordinate() is not None:
        net = llama(torch.bfloat16, tie_word_embeddings=True)
        fully_shard(net, mesh=mesh)
        other = lowbit.AdamW8bit(net.parameters(), weights="24bit", min_numel=0)
        with pytest.raises(ValueError, match="expected the whole state of a parameter of 257 rows, found a tensor of"):
            other.load_state_dict(state)
        assert not other.state
    single = lowbit.AdamW8bit(
        llama(torch.bfloat16, tie_word_embeddings=True).parameters(), weights="24bit", min_numel=0
    )
    with pytest.raises(ValueError, match=r"of shape \(257, 64\), is of no format that lowbit reads: .*exp_avg \("):
        single.load_state_dict(state)
    assert not single.state


CHECKS = {"policies": check_policies, "flattened": check_flattened, "sizes": check_sizes, "parts": check_parts}
