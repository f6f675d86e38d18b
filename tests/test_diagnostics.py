"""Curves of a run, and what the diagnostics measure of an optimizer, against Adam in float64."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from bitsandbytes.functional import dequantize_blockwise
from cases import through_a_file
from test_train import CONFIG, PAD, examples, model
from torch.nn import functional as F

import lowbit
from lowbit.bench import peers
from lowbit.finetune.checkpoints import STATE, whole
from lowbit.finetune.data import batches
from lowbit.finetune.diagnostics import SAMPLE, Diagnostics
from lowbit.finetune.options import FinetuneOptions, resolve
from lowbit.finetune.run import finetune
from lowbit.finetune.train import train

BETAS, EPS = (0.9, 0.999), 1e-8


class Adam64:
    """The moments of Adam in float64."""

    def __init__(self, betas=BETAS, eps=EPS):
        self.betas, self.eps, self.step, self.m, self.v = betas, eps, 0, 0.0, 0.0

    def add(self, g):
        """Take a gradient in; returns the largest update."""
        g = g.detach().double()
        self.step += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * g
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g * g
        return largest(self.step, self.m, self.v, self.betas, self.eps)


def largest(step, m, v, betas=BETAS, eps=EPS):
    """The largest update of decoded moments."""
    m, v = m.double() / (1 - betas[0] ** step), v.double() / (1 - betas[1] ** step)
    return (m / (v.sqrt() + eps)).abs().max().item()


def gradient(step, shape, seed=0):
    """Gradients of sizes from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    sizes = 10.0 ** -(torch.arange(math.prod(shape)) % 7).view(shape)
    return torch.randn(shape, generator=generator) * sizes


def take(optimizer, diagnostics, pairs):
    """A step with gradients of parameters."""
    for p, g in pairs:
        p.grad = g.to(p.dtype)
    diagnostics.observe()
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_update_is_the_largest_of_all_elements_of_all_groups(fused):
    ps = [torch.nn.Parameter(torch.ones(shape)) for shape in ((40, 30), (7,))]
    groups = [{"params": ps[:1]}, {"params": ps[1:], "betas": (0.5, 0.7), "eps": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=BETAS, eps=EPS, fused=fused)
    diagnostics, references = Diagnostics(optimizer), (Adam64(), Adam64((0.5, 0.7), 1e-3))
    for step in range(12):
        found = [gradient(step, p.shape, seed) for seed, p in enumerate(ps)]
        take(optimizer, diagnostics, zip(ps, found, strict=True))
        expected = max(each.add(g) for each, g in zip(references, found, strict=True))
        assert diagnostics.measure() == {"update": pytest.approx(expected, rel=1e-5), "stuck": 0.0}


def test_an_element_without_gradients_has_no_update():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], lr=1e-3, eps=0.0)
    diagnostics = Diagnostics(optimizer)
    take(optimizer, diagnostics, [(p, torch.tensor([0.0, 3.0]))])
    assert diagnostics.measure() == {"update": pytest.approx(1.0, rel=1e-6), "stuck": 0.0}


def test_the_curves_of_a_run_are_of_the_gradients_that_the_optimizer_saw():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.0)
    references, expected = [Adam64() for _ in net.parameters()], []

    def record(*_):
        expected.append(max(each.add(p.grad) for each, p in zip(references, net.parameters(), strict=True)))

    optimizer.register_step_pre_hook(record)
    config = replace(CONFIG, steps=5, clip=0.1, grad_accum=2, log_every=2, diagnostics=True)
    curves = train(net, optimizer, examples(), PAD, config).curves
    at = [2, 4, 5]
    assert [step for step, _ in curves["update"]] == at and curves["stuck"] == [[step, 0.0] for step in at]
    assert [value for _, value in curves["update"]] == pytest.approx([expected[step - 1] for step in at], rel=1e-4)
    assert [step for step, _ in curves["seconds"]] == at
    assert [step for step, _ in curves["grad_norm"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("clip", "steps"), [(1.0, [1, 2, 3, 4, 5]), (0.0, [2, 4, 5])])
def test_without_clipping_gradients_are_read_for_reports_only(clip, steps):
    net = model()
    config = replace(CONFIG, steps=5, clip=clip, log_every=2)
    curves = train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), examples(), PAD, config).curves
    assert [step for step, _ in curves["grad_norm"]] == steps


def test_without_diagnostics_there_is_no_curve_of_them():
    net = model()
    curves = train(net, torch.optim.AdamW(net.parameters(), lr=1e-2), examples(), PAD, CONFIG).curves
    assert set(curves) == {"seconds", "grad_norm"}


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_grad_norm_is_that_before_clipping(clip):
    net, data = model(), examples()
    chosen = [data[i] for i in batches(data, CONFIG.batch_size, CONFIG.seed, 0, CONFIG.group_by_length)[0]]
    losses = [
        F.cross_entropy(net(input_ids=torch.tensor([x.input_ids])).logits[0, :-1], torch.tensor(x.labels[1:]),
                        reduction="sum", ignore_index=-100)
        for x in chosen
    ]  # fmt: skip
    loss = sum(losses) / sum(label != -100 for x in chosen for label in x.labels[1:])
    squares = [g.double().square().sum().item() for g in torch.autograd.grad(loss, list(net.parameters()))]
    config = replace(CONFIG, steps=1, clip=clip)
    curves = train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), data, PAD, config).curves
    assert curves["grad_norm"] == [[1, pytest.approx(math.sqrt(sum(squares)), rel=1e-4)]]


def falling_gradients(make):
    """``(stuck, optimizer, parameter, exact v)`` after gradients near 1, then near 0.05 until v should have halved."""
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer, reference = make([p], lr=1e-4, betas=BETAS, eps=EPS), Adam64()
    diagnostics = Diagnostics(optimizer)
    scale = torch.linspace(0.95, 1.05, p.numel()).view(p.shape).to(torch.bfloat16)
    for size, steps in ((1.0, 700), (0.05, 900)):
        for _ in range(steps):
            take(optimizer, diagnostics, [(p, size * scale)])
            reference.add(p.grad)
    return diagnostics.measure()["stuck"], optimizer, p, reference.v


def test_a_second_moment_in_bf16_is_stuck():
    stuck, optimizer, p, exact = falling_gradients(torch.optim.AdamW)
    v = optimizer.state[p]["exp_avg_sq"]
    assert v.dtype == torch.bfloat16
    ratio = v.double() / exact
    assert stuck == pytest.approx(((ratio > 2) | (ratio < 0.5)).double().mean().item(), abs=1e-3)
    assert stuck > 0.5


def test_a_second_moment_in_8_bits_is_not_stuck():
    assert falling_gradients(lowbit.AdamW8bit)[0] < 0.05


def decoded(name, state):
    """``(m, v)`` of a parameter's state by the library's own means."""
    if name.startswith("torchao"):
        return state["exp_avg"].dequantize(), state["exp_avg_sq"].dequantize()
    tables = state.get("__bnb_optimizer_quant_state__", state)
    return [
        dequantize_blockwise(tables[f"state{i}"], absmax=tables[f"absmax{i}"], code=tables[f"qmap{i}"], blocksize=256)
        for i in (1, 2)
    ]


@pytest.mark.parametrize("name", ["torchao-8bit", "torchao-4bit", "torchao-fp8", "bitsandbytes-8bit"])
def test_update_of_other_libraries(name):
    """Gradients of one size, of which no v is rounded to 0: that gives updates of any size."""
    p = torch.nn.Parameter(torch.ones(64, 256))
    optimizer = peers.find(name).build([p], 1e-3, BETAS, EPS, 0.0, 0)
    diagnostics = Diagnostics(optimizer)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        take(optimizer, diagnostics, [(p, 1.0 + 0.1 * torch.randn(p.shape, generator=generator))])
    found = diagnostics.measure()
    m, v = decoded(name, optimizer.state[p])
    assert found["update"] == pytest.approx(largest(5, m, v), rel=1e-4) and 0.5 < found["update"] < 2.0
    assert found["stuck"] == 0.0


@pytest.mark.parametrize("name", ["torch", "torch-fp32", "bitsandbytes-8bit", "8bit", "4bit", "8bit+24bit", "fp8"])
def test_optimizers_of_the_benchmark_are_followed(name):
    dtype = torch.float32 if peers.find(name).fp32_weights else torch.bfloat16
    net = model(dtype)
    optimizer = peers.find(name).build(net.parameters(), 1e-3, BETAS, EPS, 0.0, 0)
    curves = train(net, optimizer, examples(), PAD, replace(CONFIG, diagnostics=True)).curves
    assert [step for step, _ in curves["update"]] == [step for step, _ in curves["stuck"]] == [2, 4]
    assert all(0 < value < math.inf for _, value in curves["update"])
    assert all(0 <= value <= 1 for _, value in curves["stuck"])


def test_an_optimizer_without_moments_is_left_out():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    curves = train(net, optimizer, examples(), PAD, replace(CONFIG, diagnostics=True)).curves
    assert set(curves) == {"seconds", "grad_norm"}


def test_only_the_first_elements_of_a_parameter_are_sampled():
    p = torch.nn.Parameter(torch.ones(SAMPLE + 10))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    diagnostics = Diagnostics(optimizer)
    take(optimizer, diagnostics, [(p, torch.ones_like(p))])
    v = optimizer.state[p]["exp_avg_sq"]
    v[SAMPLE:] *= 100
    assert diagnostics.measure()["stuck"] == 0.0
    v[: SAMPLE // 4] *= 2.1
    v[SAMPLE // 4 : SAMPLE // 2] /= 2.1
    v[SAMPLE // 2 : SAMPLE] *= 1.9
    assert diagnostics.measure()["stuck"] == 0.5


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options of a run of six steps with a checkpoint every two."""
    folder = tmp_path_factory.mktemp("tiny")
    data = tiny.write_json(folder / "data.json", tiny.records())
    return resolve(
        FinetuneOptions(
            model=tiny.write_model(folder / "model"), data=data, eval_data="none", steps=6, batch_size=4,
            max_length=256, lr=0.01, device="cpu", log_every=1, save_every=2, diagnostics=True,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(options, tmp_path_factory):
    """The result of the run that nothing stops."""
    return finetune(replace(options, out=str(tmp_path_factory.mktemp("whole") / "out")))[0]


def stopped(options, tmp_path):
    """Options to go on with after a stop at step 5, two steps after the checkpoint's last report."""
    options = replace(options, out=str(tmp_path / "out"))
    with pytest.raises(tiny.Stopped):
        finetune(options, on_step=tiny.stop_at(5))
    assert [path.name for path in whole(options.out)] == ["step-000004"]
    return replace(options, resume=True)


def test_curves_go_on_after_a_resume(options, undisturbed, tmp_path):
    result = finetune(stopped(options, tmp_path))[0]
    assert result.losses == undisturbed.losses
    for name in ("grad_norm", "update", "stuck"):
        assert [step for step, _ in result.curves[name]] == [1, 2, 3, 4, 5, 6]
        assert result.curves[name] == undisturbed.curves[name], name
    seconds = [value for _, value in result.curves["seconds"]]
    assert [step for step, _ in result.curves["seconds"]] == [1, 2, 3, 4, 5, 6] and seconds == sorted(seconds)


def test_the_exact_means_are_saved():
    """With a saved mean, what is stuck stays so after a resume; without one it begins with the optimizer's own."""
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p], lr=1e-4, betas=BETAS)
    before, resumed, begun = (Diagnostics(optimizer) for _ in range(3))
    take(optimizer, before, [(p, torch.ones(8))])
    optimizer.state[p]["exp_avg_sq"].mul_(3)
    assert before.measure()["stuck"] == 1.0
    resumed.load_state_dict(through_a_file(before.state_dict()))
    begun.load_state_dict(None)
    for diagnostics in (resumed, begun):
        p.grad = torch.zeros_like(p)
        diagnostics.observe()
    optimizer.step()
    assert resumed.measure()["stuck"] == 1.0 and begun.measure()["stuck"] == 0.0


def test_a_run_resumes_with_the_exact_means(options, tmp_path):
    options = replace(options, optimizer="torch", beta2=0.999)
    resumed = stopped(options, tmp_path)
    path = whole(resumed.out)[0] / STATE
    state = torch.load(path, weights_only=True)
    assert len(state["diagnostics"]) == len(state["optimizer"]["state"])
    state["diagnostics"] = [3 * x for x in state["diagnostics"]]
    torch.save(state, path)
    curve = finetune(resumed)[0].curves["stuck"]
    assert all(value < 0.1 for _, value in curve[:4]) and all(value > 0.3 for _, value in curve[4:])


def test_a_checkpoint_of_before_there_were_curves_loads(options, undisturbed, tmp_path):
    options = stopped(options, tmp_path)
    path = whole(options.out)[0] / STATE
    state = torch.load(path, weights_only=True)
    for name in ("curves", "seconds", "diagnostics"):
        del state[name]
    torch.save(state, path)
    result = finetune(options)[0]
    assert result.losses == undisturbed.losses
    assert result.curves["grad_norm"] == undisturbed.curves["grad_norm"][4:]
    assert result.curves["update"] == undisturbed.curves["update"][4:]
    assert [step for step, _ in result.curves["seconds"]] == [5, 6]
