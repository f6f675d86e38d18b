"""What only a GPU shows: no waiting for the device, CUDA graphs, side streams, and how often kernels are compiled."""

import os
import subprocess
import sys

import pytest
import torch
from cases import same_bits

import lowbit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = ((512, 1024), (70, 100), (300,), (3, 0), (33, 65))


def pair(**options):
    """Two optimizers of equal parameters and gradients on the GPU."""
    torch.manual_seed(0)
    values = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in SHAPES]
    gradients = [torch.randn_like(x) for x in values]
    found = []
    for _ in range(2):
        params = [torch.nn.Parameter(x.clone()) for x in values]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.clone()
        found.append((params, lowbit.AdamW(params, lr=1e-3, **options)))
    return found


def assert_same(ps, a, qs, b):
    for p, q in zip(ps, qs, strict=True):
        assert same_bits(p.detach(), q.detach())
        assert a.state[p].keys() == b.state[q].keys()
        assert all(same_bits(x, b.state[q][name]) for name, x in a.state[p].items())


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_a_steady_step_never_waits_for_the_device(state):
    (ps, a), (qs, b) = pair(state=state)
    a.step(), b.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 2e-3
        ps[0].grad = qs[0].grad.clone()  # at a new address
        a.step(), b.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(ps, a, qs, b)


@pytest.mark.parametrize("options", [{}, {"state": "4bit", "weights": "24bit"}], ids=str)
def test_a_graph_replayed_a_hundred_times_is_a_hundred_steps(options):
    (ps, a), (qs, b) = pair(**options)
    lr = torch.tensor(1e-3, device="cuda")
    for group in (*a.param_groups, *b.param_groups):
        group["lr"] = lr
    a.step(), b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for i in range(100):
        lr.fill_(1e-3 / (i + 1))
        graph.replay()
        b.step()
    assert a.state[ps[0]]["step"].item() == 101
    assert_same(ps, a, qs, b)


def test_a_side_stream():
    (ps, a), (qs, b) = pair()
    stream = torch.cuda.Stream()
    for _ in range(3):
        b.step()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            a.step()
        torch.cuda.current_stream().wait_stream(stream)
    assert_same(ps, a, qs, b)


@pytest.mark.parametrize("options", [{}, {"state": "4bit"}, {"weights": "24bit"}], ids=str)
def test_a_checkpoint_goes_to_another_device_and_back(options, tmp_path):
    (ps, a), _ = pair(**options)
    a.step()
    torch.save([[p.detach() for p in ps], a.state_dict()], tmp_path / "gpu.pt")
    weights = torch.load(tmp_path / "gpu.pt", map_location="cpu", weights_only=True)[0]
    qs = [torch.nn.Parameter(x) for x in weights]
    b = lowbit.AdamW(qs, lr=1e-3, **options)
    b.load_state_dict(torch.load(tmp_path / "gpu.pt", weights_only=True)[1])  # as it was saved, on the GPU
    for p, q in zip(ps, qs, strict=True):
        assert all(x.device.type == "cpu" and same_bits(x, a.state[p][name].cpu()) for name, x in b.state[q].items())
        q.grad = p.grad.cpu()
    b.step()
    rs = [torch.nn.Parameter(q.detach().cuda()) for q in qs]
    c = lowbit.AdamW(rs, lr=1e-3, **options)
    c.load_state_dict(b.state_dict())
    a.step()
    for p, r in zip(ps, rs, strict=True):
        # a fused multiply-add moves a value across a rounding edge now and then
        for name in ("exp_avg", "exp_avg_sq"):
            x, y = a.state[p][name], c.state[r][name]
            assert y.device.type == "cuda"
            if x.dtype == torch.float32:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-12)
            else:
                assert (x != y).sum() <= max(1, 1e-3 * x.numel())
        torch.testing.assert_close(p.detach().float(), r.detach().float(), rtol=2**-7, atol=1e-6)


def test_every_device_steps_its_own():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (ps, a), (qs, b) = pair()
    with torch.no_grad():
        ps[0].data, ps[0].grad = ps[0].data.to("cuda:1"), None
        ps[0].grad = qs[0].grad.to("cuda:1")
    a.step(), b.step()
    assert same_bits(ps[0].detach().to("cuda:0"), qs[0].detach())


@pytest.mark.parametrize("bits", [24, 32, None])
def test_flashoptims_next_step(bits):
    """Its own state dict, loaded: the next step gives its weights, but for bf16 roundings the other way."""
    import flashoptim  # needs CUDA; benchmarks/on_gpu.sh says what to install

    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(96, 256, device="cuda", dtype=torch.bfloat16))]
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.0}
    theirs = flashoptim.FlashAdamW(ps, master_weight_bits=bits, **options)
    for _ in range(5):
        ps[0].grad = torch.randn_like(ps[0])
        theirs.step()
    weights = "nearest" if bits is None else f"{bits}bit"
    qs = [torch.nn.Parameter(ps[0].detach().clone())]
    ours = lowbit.AdamW(qs, state="fp32", weights=weights)
    ours.load_state_dict(theirs.state_dict())
    qs[0].grad = ps[0].grad = torch.randn_like(ps[0])
    theirs.step(), ours.step()
    moved = (qs[0].detach().float() - ps[0].detach().float()).abs() / ps[0].detach().float().abs()
    assert moved.max() <= 2**-7  # one bf16 apart at most
    assert (moved > 0).float().mean() <= (0.02 if bits is None else 0.05)


COMPILES = """
import torch, lowbit
torch.manual_seed(0)
params = []
for i in range(50):
    p = torch.nn.Parameter(torch.randn(64 + i, 100 + 13 * i, device="cuda", dtype=torch.bfloat16))
    params.append(p)
optimizer = lowbit.AdamW8bit(params)
for i in range(10):
    for p in params:
        p.grad = torch.randn_like(p)
    for group in optimizer.param_groups:
        group.update(lr=1e-3 / (i + 1), betas=(0.9 - i / 100, 0.999 - i / 1000), weight_decay=0.1 * i)
    optimizer.step()
torch.cuda.synchronize()
"""


def test_fifty_shapes_and_ten_schedules_compile_once(tmp_path):
    """One kernel of whole chunks, one of the rest, one for the scalars."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILES], env=environment, check=True)
    names = [path.stem for path in tmp_path.rglob("*.cubin")]
    assert sorted(names) == ["scalars_kernel", "step_kernel", "step_kernel"]
