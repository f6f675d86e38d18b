"""The training loop against closed forms and plain torch."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import through_a_file
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM

import lowbit
from lowbit.bench import peers
from lowbit.finetune import timing
from lowbit.finetune.data import Example, batches
from lowbit.finetune.errors import UserError
from lowbit.finetune.memory import peak_bytes, reset_peak, state_bytes
from lowbit.finetune.options import Options
from lowbit.finetune.train import Training, schedule_for, train

CONFIG = Options(steps=4, batch_size=4, max_length=32, lr=1e-2, warmup=0.0, clip=0.0, log_every=2)
PAD = 0


def model(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def examples(count=16):
    """Examples of 5 to 24 tokens, of which 1 to 12 are targets."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        prompt, response = 4 + i % 9, 1 + (5 * i) % 12
        ids = torch.randint(1, 64, (prompt + response,), generator=generator).tolist()
        made.append(Example(ids, [-100] * prompt + ids[prompt:]))
    return made


def sgd(net, lr=0.5):
    return torch.optim.SGD(net.parameters(), lr=lr)


def one_step_by_hand(net, chosen, lr):
    """One SGD step on the mean loss over all target tokens, an example at a time, without padding; the loss."""
    losses = []
    for example in chosen:
        logits = net(input_ids=torch.tensor([example.input_ids])).logits[0, :-1]
        losses.append(F.cross_entropy(logits, torch.tensor(example.labels[1:]), reduction="none", ignore_index=-100))
    count = sum(label != -100 for example in chosen for label in example.labels[1:])
    loss = torch.cat(losses).sum() / count
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for p, g in zip(net.parameters(), gradients, strict=True):
            p -= lr * g
    return loss.item()


@pytest.mark.parametrize("batch_size, grad_accum", [(8, 1), (4, 2), (3, 3), (1, 8)])
def test_gradient_is_of_the_mean_over_all_targets_of_a_step(batch_size, grad_accum):
    data = examples()
    config = replace(CONFIG, steps=1, batch_size=batch_size, grad_accum=grad_accum, schedule="constant")
    ours, by_hand = model(), model()
    result = train(ours, sgd(ours), data, PAD, config)
    chosen = batches(data, batch_size * grad_accum, config.seed, 0, config.group_by_length)[0]
    loss = one_step_by_hand(by_hand, [data[i] for i in chosen], lr=0.5)
    assert result.losses == [(1, pytest.approx(loss, rel=1e-5))]
    for p, q in zip(ours.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_clip_bounds_the_norm_of_the_gradient():
    net, before = model(), model()
    train(net, sgd(net, lr=1.0), examples(), PAD, replace(CONFIG, steps=1, clip=1e-3, schedule="constant"))
    moved = [p - q for p, q in zip(net.parameters(), before.parameters(), strict=True)]
    assert math.sqrt(sum(x.double().square().sum().item() for x in moved)) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    "schedule, warmup, expected",
    [
        ("constant", 0.0, [1.0] * 8),
        ("linear", 0.0, [1 - t / 8 for t in range(8)]),
        ("cosine", 0.0, [(1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]),
        ("cosine", 2.0, [0.0, 0.5] + [(1 + math.cos(math.pi * t / 6)) / 2 for t in range(6)]),
        ("linear", 0.25, [0.0, 0.5] + [1 - t / 6 for t in range(6)]),
        ("constant", 0.5, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
    ],
)
@pytest.mark.parametrize("make", [torch.optim.AdamW, lowbit.AdamW8bit])
def test_schedule(schedule, warmup, expected, make):
    optimizer = make([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    steps = schedule_for(optimizer, replace(CONFIG, schedule=schedule, warmup=warmup), 8)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        steps.step()
    assert rates == pytest.approx([0.1 * x for x in expected])


@pytest.mark.parametrize("epochs, steps", [(1.0, 4), (0.5, 2), (2.5, 10), (0.01, 1)])
def test_epochs_are_passes_over_the_data(epochs, steps):
    seen = []
    net = model()
    config = replace(CONFIG, steps=None, epochs=epochs, batch_size=2, grad_accum=2)
    result = train(net, sgd(net), examples(), PAD, config, on_step=lambda run: seen.append((run.step, run.total)))
    assert result.steps == steps and seen == [(i + 1, steps) for i in range(steps)]
    assert [step for step, _ in result.losses] == list(range(1, steps + 1))


def test_tokens_per_second_counts_tokens_without_padding_after_the_first_steps(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    throughput = timing.Throughput(2, torch.device("cpu"))  # reads 0
    throughput.add(1000, 2000)
    throughput.add(1000, 2000)  # reads 1: timed from here
    throughput.add(30, 32)
    with throughput.pause():  # reads 2 and 3: one second that does not count
        pass
    throughput.add(50, 64)
    assert throughput.rates() == (80 / (4 - 1 - 1), 96 / (4 - 1 - 1))


def test_counting_begins_anew_after_a_compilation_in_the_first_half(monkeypatch):
    clock, graphs = iter(range(1000)), iter([1, 1, 2, 2, 2, 3, 3])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing, "graphs_compiled", lambda: next(graphs))
    throughput = timing.Throughput(1, torch.device("cpu"), latest=3)  # reads 0, one graph
    throughput.add(1000, 2000)  # reads 1
    throughput.add(1000, 2000)  # a second graph: reads 2, timed from here
    for _ in range(2):
        throughput.add(30, 32)
    throughput.add(30, 32)  # a third graph, too late to begin anew
    assert throughput.skip == 2 and throughput.rates() == (90 / 1, 96 / 1)


def test_layers_are_compiled_inside_checkpoints(monkeypatch):
    compiled, compiler = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compiler(f, dynamic=dynamic, backend=backend))

    def backend(graph, inputs):
        compiled.append(sum(node.target is F.linear for node in graph.graph.nodes))
        return graph

    losses = {}
    for name, options in (
        ("plain", {}), ("compiled", {"compile": True}), ("both", {"compile": True, "checkpointing": True})
    ):  # fmt: skip
        net = model()
        torch._dynamo.reset()
        compiled.clear()
        losses[name] = [loss for _, loss in train(net, sgd(net), examples(), PAD, replace(CONFIG, **options)).losses]
        assert (set(compiled) == {7}) == (name != "plain")  # q, k, v, o, gate, up, down: whole layers
        assert all("forward" not in vars(layer) for layer in net.model.layers)
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["both"] == pytest.approx(losses["plain"], rel=1e-5)


def test_a_run_measures_the_tokens_of_its_examples(monkeypatch):
    data, counted = examples(), []
    monkeypatch.setattr(timing.Throughput, "add", lambda self, *tokens: counted.append(tokens))
    net = model()
    train(net, sgd(net), data, PAD, replace(CONFIG, steps=None, epochs=2.0))
    tokens, padded = (sum(column) for column in zip(*counted, strict=True))
    assert len(counted) == 8 and tokens == 2 * sum(len(example.input_ids) for example in data)
    assert padded == 4 * sum(
        max(-(-len(data[i].input_ids) // 8) * 8 for i in chosen)
        for epoch in range(2)
        for chosen in batches(data, 4, CONFIG.seed, epoch, CONFIG.group_by_length)
    )


@pytest.mark.parametrize("name", ["torch", "8bit", "8bit+24bit", "4bit"])
def test_resume_is_bit_equal(name):
    def start():
        net = model(torch.bfloat16)
        return net, peers.find(name).build(net.parameters(), 1e-2, (0.9, 0.99), 1e-8, 0.1, 7)

    whole, whole_optimizer = start()
    saved = {}

    def keep(run):
        if run.step == 3:
            saved["model"] = {key: x.clone() for key, x in run.model.state_dict().items()}
            saved["run"] = through_a_file(run.state_dict())

    config = replace(CONFIG, steps=6, warmup=2.0, batch_size=3, clip=1.0)
    result = train(whole, whole_optimizer, examples(), PAD, config, on_step=keep)
    resumed, optimizer = start()
    resumed.load_state_dict(saved["model"])
    again = train(resumed, optimizer, examples(), PAD, config, resume=saved["run"])
    assert again.losses == result.losses and len(result.losses) == 6
    _equal(resumed.state_dict(), whole.state_dict())
    _equal(optimizer.state_dict(), whole_optimizer.state_dict())


def _equal(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _equal(x, y)
    else:
        assert a == b


def test_checkpointing_and_autocast_change_rounding_only():
    losses, passes = {}, Counter()
    for name, options, autocast in (
        ("plain", {}, None), ("checkpointing", {"checkpointing": True}, None), ("autocast", {}, torch.bfloat16)
    ):  # fmt: skip
        net = model()
        net.model.layers[1].mlp.register_forward_pre_hook(lambda *_, name=name: passes.update([name]))
        result = train(net, sgd(net), examples(), PAD, replace(CONFIG, **options), autocast=autocast)
        losses[name] = [loss for _, loss in result.losses]
        assert not net.training and net.lm_head.weight.dtype == torch.float32
    assert passes == {"plain": 4, "checkpointing": 8, "autocast": 4}
    assert losses["checkpointing"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["autocast"] == pytest.approx(losses["plain"], rel=2e-2)
    assert losses["autocast"] != losses["plain"]


def test_a_loss_that_is_not_finite_stops_the_run():
    net = model()
    with torch.no_grad():
        net.lm_head.weight[3, 3] = math.nan
    with pytest.raises(UserError, match=r"loss became nan at step 1: lower --lr"):
        train(net, sgd(net), examples(), PAD, CONFIG)


def test_no_examples():
    net = model()
    with pytest.raises(UserError, match="no example to train on"):
        train(net, sgd(net), [], PAD, CONFIG)


def test_losses_are_read_together():
    run = Training(None, None, None, 5, step=3, pending=[torch.tensor(2.0), torch.tensor(1.0)])
    assert run.loss is None
    run.read_losses()
    assert run.losses == [(2, 2.0), (3, 1.0)] and run.loss == 1.0 and run.pending == []


@pytest.mark.parametrize(
    "name, expected",
    [("torch-fp32", 8.0), ("fp32", 8.0), ("bf16", 4.0), ("8bit", 2 + 2 / 32), ("8bit+24bit", 3 + 2 / 32)],
)
def test_state_bytes(name, expected):
    p = torch.nn.Parameter(torch.ones(256, 256, dtype=torch.float32 if "fp32" in name else torch.bfloat16))
    optimizer = peers.find(name).build([p], 1e-3, (0.9, 0.999), 1e-8, 0.0, 0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert state_bytes(optimizer) / p.numel() == pytest.approx(expected, abs=1e-3)  # the step counter is in it


def test_state_bytes_sees_into_tensor_subclasses_and_counts_shared_tensors_once():
    p = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = torch.optim.AdamW([p])
    codes, scale, table = torch.ones(256, 256), torch.ones(256, 256), torch.ones(256)
    optimizer.state[p] = {"m": TwoTensor(codes, scale), "v": TwoTensor(codes.clone(), scale.clone())}
    optimizer.state["other"] = {"tables": [table, table], "step": torch.zeros(())}
    assert state_bytes(optimizer) == 4 * p.numel() * 4 + 256 * 4 + 4


def test_peak_memory_is_of_the_time_since_the_reset():
    cpu = torch.device("cpu")
    reset_peak(cpu)
    before = peak_bytes(cpu)
    big = torch.ones(1 << 26)  # 256 MiB
    grown = peak_bytes(cpu) - before
    del big
    assert 250 * 2**20 < grown < 400 * 2**20
    reset_peak(cpu)
    assert peak_bytes(cpu) - before < 100 * 2**20
