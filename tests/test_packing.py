"""Packed rows against the same examples one at a time, and Liger's kernels being asked for."""

import copy
import sys
import types
from dataclasses import replace

import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from lowbit.finetune import liger, timing
from lowbit.finetune.data import Example, collate
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import Options
from lowbit.finetune.packing import check_apart, pack
from lowbit.finetune.train import Order, gradients, train

PAD, LENGTH, CPU = 0, 64, torch.device("cpu")
CONFIG = Options(steps=1, batch_size=2, max_length=LENGTH, lr=1e-2, warmup=0.0, packing=True, schedule="constant")


def examples(count=24, whole=False):
    """Examples of 5 to 40 tokens, the loss on their second half, or on all."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        ids = torch.randint(1, 257, (5 + (7 * i) % 36,), generator=generator).tolist()
        made.append(Example(ids, ids if whole else [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]))
    return made


def llama(**options):
    return tiny.llama(torch.float32, use_cache=False, **options)


def test_rows_hold_every_example_once_whole_and_are_full():
    data = examples(300)
    rows = pack(data, LENGTH, seed=3)
    parts = []
    for row in rows:
        assert sum(row.lengths) == len(row.input_ids) == len(row.labels) <= LENGTH
        ids = iter(row.input_ids)
        parts += [[next(ids) for _ in range(length)] for length in row.lengths]
    assert sorted(parts) == sorted(example.input_ids for example in data)
    assert sum(row.targets for row in rows) == sum(example.targets for example in data)
    tokens = sum(len(example.input_ids) for example in data)
    assert len(rows) <= 1.05 * tokens / LENGTH + 1
    assert pack(data, LENGTH, seed=3) == rows != pack(data, LENGTH, seed=4)


def test_positions_begin_anew_for_each_example_and_the_padding():
    row = pack([Example([1, 2, 3], [1, 2, 3]), Example([4, 5], [-100, 5])], 8, seed=0)[0]
    batch = collate([row], PAD, "cpu")
    order = [3, 2] if row.input_ids[0] == 1 else [2, 3]
    assert batch["position_ids"].tolist() == [[*range(order[0]), *range(order[1]), 0, 1, 2]]
    assert (
        batch["labels"].tolist()[0] == ([-100, 2, 3, -100, 5] if order[0] == 3 else [-100, 5, -100, 2, 3]) + [-100] * 3
    )
    assert set(batch) == {"input_ids", "labels", "position_ids"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_that_of_the_examples_one_at_a_time(attention, whole, packing):
    data, model = examples(whole=whole), llama(attn_implementation=attention)
    config = replace(CONFIG, packing=packing, group_by_length=False)  # so rows are padded
    order, alone = Order(data, config), copy.deepcopy(model)
    micro_batches = [rows for step in range(len(order.steps)) for rows in order[step]]
    loss = gradients(model, order.examples, micro_batches, PAD, CPU, None)
    targets = sum(example.targets for example in data)
    total = 0.0
    for example in data:
        logits = alone(input_ids=torch.tensor([example.input_ids])).logits[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, torch.tensor(example.labels[1:]), reduction="sum") / targets
        part.backward()
        total += part.item()
    assert loss.item() == pytest.approx(total, rel=1e-6) and (len(order.examples) < len(data) / 2) == packing
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5 * q.grad.abs().max().item())


def test_a_step_takes_rows_and_less_padding(monkeypatch):
    data, counted = examples(), []
    monkeypatch.setattr(timing.Throughput, "add", lambda self, *tokens: counted.append(tokens))
    for packing in (False, True):
        net = llama()
        config = replace(CONFIG, steps=None, epochs=1.0, packing=packing, group_by_length=False)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), data, PAD, config)
    tokens = sum(len(example.input_ids) for example in data)
    alone, packed = counted[:12], counted[12:]
    assert sum(x for x, _ in alone) == sum(x for x, _ in packed) == tokens
    assert len(packed) == -(-len(pack(data, LENGTH, CONFIG.seed)) // 2)
    assert all(x <= y <= 2 * LENGTH and y % 8 == 0 for x, y in packed)
    assert sum(y for _, y in packed) < sum(y for _, y in alone)


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"grad_accum": 2}])
def test_packing_goes_with_other_options(options):
    losses = []
    for other in ({}, options):
        net = llama()
        config = replace(CONFIG, **({"batch_size": 4} if "grad_accum" in options and not other else {}), **other)
        losses.append(train(net, torch.optim.SGD(net.parameters(), lr=0.1), examples(), PAD, config).losses)
    assert losses[0] == [(1, pytest.approx(losses[1][0][1], rel=1e-6))]


def test_models_that_would_mix_examples_are_refused():
    small = dict(vocab_size=257, bos_token_id=0, eos_token_id=0)
    check_apart(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, use_cache=False, **small)))
    mamba = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=8, **small))
    with pytest.raises(UserError, match="MambaForCausalLM takes no positions"):
        check_apart(mamba)
    model = llama()
    check_apart(model)
    forward = model.model.forward
    model.model.forward = lambda position_ids=None, **inputs: forward(**inputs)
    with pytest.raises(UserError, match="lets packed examples attend to each other: leave --packing off"):
        check_apart(model)
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def fake_liger(monkeypatch):
    """A module in place of Liger that knows Llama alone; the list of calls made to it."""
    calls = []
    transformers = types.ModuleType("liger_kernel.transformers")
    transformers._apply_liger_kernel_to_instance = lambda **options: calls.append(options)
    patch = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    package = types.ModuleType("liger_kernel")
    for module in (package, transformers, patch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_liger_replaces_norms_positions_and_mlps_and_no_loss(fake_liger):
    model = llama()
    liger.apply(model, torch.device("cuda"))
    kernels = {"rope": True, "rms_norm": True, "swiglu": True}
    assert fake_liger == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False, **kernels}]


def test_liger_where_it_can_not_be(fake_liger, monkeypatch):
    model = llama()
    with pytest.raises(UserError, match="--liger needs a GPU and --device is cpu"):
        liger.apply(model, CPU)
    model.config.model_type = "mamba"
    with pytest.raises(UserError, match="no kernels for models of type mamba"):
        liger.apply(model, torch.device("cuda"))
    assert fake_liger == []
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(UserError, match="pip install liger-kernel"):
        liger.apply(model, torch.device("cuda"))
