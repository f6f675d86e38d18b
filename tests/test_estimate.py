"""``lowbit estimate``: bytes against closed forms and against what the libraries themselves keep."""

from types import SimpleNamespace

import pytest
import tiny
import torch

from lowbit.bench import estimate as estimates
from lowbit.bench import peers
from lowbit.finetune.errors import UserError
from lowbit.finetune.memory import state_bytes
from lowbit.finetune.options import EstimateOptions, resolve

SHAPES = ((256, 64), (257, 64), (100, 100), (64, 32), (512,), (4096,))
INSTALLED = ("torch", "bitsandbytes-8bit", "torchao-8bit", "torchao-4bit", "8bit", "4bit", "8bit+24bit")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Options of a tiny model and data."""
    folder = tmp_path_factory.mktemp("tiny")
    data = tiny.write_json(folder / "data.json", tiny.records())
    return {"model": tiny.write_model(folder / "model"), "data": data, "batch_size": 4, "max_length": 256}


def run(setting, **options):
    return {row.optimizer: row for row in estimates.estimate(resolve(EstimateOptions(**setting | options)))}


@pytest.mark.parametrize("name", INSTALLED)
def test_state_is_what_the_optimizer_keeps(name):
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    peer = peers.find(name)
    expected = peer.state_bytes(params)
    optimizer = peer.build(params, 1e-3, (0.9, 0.999), 1e-8, 0.0, 0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    tables = 2048 * (name.split("-")[0] in ("torchao", "bitsandbytes"))  # of what codes mean
    assert 0 <= state_bytes(optimizer) - expected <= len(params) * (4 + tables)  # and counters of steps


def test_weights_and_state_of_a_model(setting):
    found = run(setting, optimizers="torch,torch-fp32,8bit")
    params = list(tiny.llama(torch.bfloat16, vocab_size=257).parameters())
    numel = sum(p.numel() for p in params)
    assert (found["torch"].weights, found["torch"].state) == (2 * numel, 4 * numel)
    assert (found["torch-fp32"].weights, found["torch-fp32"].state) == (4 * numel, 8 * numel)
    kept = [2.0625 * p.numel() if p.ndim > 1 and p.numel() >= 4096 else 8 * p.numel() for p in params]
    assert found["8bit"].state == pytest.approx(sum(kept))
    assert found["8bit"].activations == found["torch"].activations > 0
    assert found["8bit"].peak == pytest.approx(
        found["8bit"].weights + found["8bit"].gradients + found["8bit"].state + found["8bit"].activations
    )
    moved = 6 * numel + 2 * found["8bit"].state
    assert found["8bit"].step == pytest.approx(moved / 4.3e12)


def test_what_a_forward_and_a_backward_pass_hold():
    """A chain of layers: their inputs are alive when the backward pass begins, and their gradients when it ends."""
    width, rows, depth = 64, 512, 6
    x = torch.zeros(rows, width)
    live = estimates.Live()
    layers = [torch.zeros(width, width, requires_grad=True) for _ in range(depth)]
    for w in layers:
        w.register_post_accumulate_grad_hook(live.count_gradient)
    with live:
        y = x
        for w in layers:
            y = (y @ w).sigmoid()
        assert live.now == depth * rows * width * 4  # what sigmoid saves is also the next layer's input
        y.sum().backward()
    assert live.gradients == depth * width * width * 4
    assert depth * rows * width * 4 < live.peak < (depth + 4) * rows * width * 4


def test_more_gpus_larger_batches_checkpointing(setting):
    one, two = (run(setting, optimizers="8bit", gpus=n)["8bit"] for n in (1, 2))
    assert (two.weights, two.state, two.step) == (one.weights / 2, one.state / 2, one.step / 2)
    replicas = run(setting, optimizers="8bit", gpus=4, replicas=2)["8bit"]
    assert (replicas.weights, replicas.state) == (two.weights, two.state)
    twice = run(setting, optimizers="8bit", batch_size=8)["8bit"]
    assert 1.8 < twice.activations / one.activations < 2.05
    assert run(setting, optimizers="8bit", batch_size=8, checkpointing=True)["8bit"].peak < twice.peak
    with pytest.raises(UserError, match="--replicas is 2: give a number that divides --gpus 3"):
        run(setting, gpus=3, replicas=2)


def test_the_command(setting, cli):
    options = [x for name, value in setting.items() for x in (f"--{name.replace('_', '-')}", value)]
    status, out, error = cli("estimate", *options, "--optimizers", "torch,8bit")
    assert status == 0 and "activations" in out and "8bit" in out, error
    status, _, error = cli("estimate", *options, "--model", "nothing/there-is.gguf")
    assert status == 2 and "no such file" in error


def test_state_in_containers_and_objects_counts_each_tensor_once():
    codes, scale = torch.zeros(64, dtype=torch.int8), torch.zeros(2, dtype=torch.float16)
    pair = SimpleNamespace(codes=codes, scales=scale, width=8, other=None)  # as FlashOptim keeps its moments
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(64)), torch.nn.Parameter(torch.zeros(2))])
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p] = {"exp_avg": pair, "step": (torch.zeros(()),), "codes": codes}
    assert state_bytes(optimizer) == 64 + 2 * 2 + 2 * 4
