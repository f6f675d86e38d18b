"""``lowbit.convert`` and the commands ``convert`` and ``inspect``: all formats, all kinds of files."""

import pytest
import tiny
import torch
import torchao.optim
from cases import STATES, assert_same_state, parameter, randn, run, same_bits
from transformers import AutoModelForCausalLM

import lowbit
from lowbit.files import files

SHAPES = ((64, 70), (65, 64), (70,), (4, 5, 230))
ROUNDING = {"fp32": 1e-6, "bf16": 2**-8, "8bit": 0.07, "12bit": 0.3, "4bit": 0.35}  # of a block's moments, to nearest


def trained(state="8bit", weights="auto", dtype=torch.float32):
    """Parameters and an optimizer of two groups after three steps."""
    ps = [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(SHAPES)]
    groups = [{"params": ps[:2]}, {"params": ps[2:], "lr": 3e-3, "betas": (0.8, 0.95)}]
    optimizer = lowbit.AdamW(groups, lr=1e-2, state=state, weights=weights, weight_decay=0.1, min_numel=0, seed=3)
    run(optimizer, ps, 3)
    return ps, optimizer


@pytest.mark.parametrize("source", STATES)
def test_to_torch_goes_on_there(source):
    """torch.optim takes the state dict, holds the decoded moments, and steps with the same options."""
    ps, optimizer = trained(source)
    new = lowbit.convert(optimizer.state_dict(), "torch", ps)
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    theirs = torch.optim.AdamW([{"params": qs[:2]}, {"params": qs[2:]}], lr=7.0)
    theirs.load_state_dict(new)
    assert [group["lr"] for group in theirs.param_groups] == [1e-2, 3e-3]
    assert [group["betas"] for group in theirs.param_groups] == [(0.9, 0.999), (0.8, 0.95)]
    for p, q in zip(ps, qs, strict=True):
        m, v = lowbit.decode(optimizer, p)
        assert same_bits(theirs.state[q]["exp_avg"], m) and same_bits(theirs.state[q]["exp_avg_sq"], v)
        assert theirs.state[q]["step"].item() == 3
    run(theirs, qs, 1, first=3), run(optimizer, ps, 1, first=3)
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)


@pytest.mark.parametrize("target", ["8bit", "4bit", "12bit", "bf16", "fp32"])
@pytest.mark.parametrize("source", STATES)
def test_between_formats(source, target):
    """The moments within the target's rounding; loading the result is loading the source."""
    ps, optimizer = trained(source, "24bit", torch.bfloat16)
    saved = optimizer.state_dict()
    new = lowbit.convert(saved, target, ps)
    assert all(same_bits(saved["state"][i]["weight_low"], new["state"][i]["weight_low"]) for i in range(len(SHAPES)))
    results = []
    for state_dict in (saved, new):
        groups = [{"params": ps[:2]}, {"params": ps[2:]}]
        results.append(lowbit.AdamW(groups, state=target, weights="24bit", min_numel=0))
        results[-1].load_state_dict(state_dict)
    for p in ps:
        assert_same_state(results[0].state[p], results[1].state[p])
        for x, y in zip(lowbit.decode(optimizer, p), lowbit.decode(results[1], p), strict=True):
            assert (x - y).norm() <= ROUNDING[target if p.ndim > 1 else "fp32"] * x.norm()
    assert results[0].param_groups[1]["lr"] == results[1].param_groups[1]["lr"] == 3e-3


def test_shapes_come_from_the_state_where_it_tells_them():
    ps, optimizer = trained("8bit")
    assert same_bits(
        lowbit.convert(optimizer.state_dict(), "fp32")["state"][3]["exp_avg"], lowbit.decode(optimizer, ps[3])[0]
    )
    ps, optimizer = trained("4bit")
    with pytest.raises(ValueError, match="4-bit codes of parameter 0"):
        lowbit.convert(optimizer.state_dict(), "fp32")
    with pytest.raises(ValueError, match="4 parameters, 'like' has 3"):
        lowbit.convert(optimizer.state_dict(), "fp32", ps[:3])
    with pytest.raises(ValueError, match="none of 8bit"):
        lowbit.convert(optimizer.state_dict(), "2bit")
    with pytest.raises(ValueError, match="'param_groups'"):
        lowbit.convert({"state": {}}, "8bit")


@pytest.mark.parametrize("name", ["new.pt", "new.safetensors", "new"])
def test_files_of_every_kind(name, tmp_path, cli):
    """Source, converted, and back: from each kind of file the same state; what is no optimizer's is kept."""
    ps, optimizer = trained("8bit")
    model = {str(i): p.detach() for i, p in enumerate(ps)}
    torch.save({"model": model, "training": {"optimizer": optimizer.state_dict(), "epoch": 2}}, tmp_path / "old.pt")
    status, out, _ = cli("convert", tmp_path / "old.pt", tmp_path / name, "--to", "fp32")
    assert status == 0 and "training.optimizer" in out and "float32" in out
    status, out, _ = cli("convert", tmp_path / name, tmp_path / "again.pt", "--to", "8bit")
    assert status == 0 and "8bit" in out
    tree = torch.load(tmp_path / "again.pt", weights_only=True)
    assert tree["training"]["epoch"] == 2 and all(same_bits(tree["model"][key], x) for key, x in model.items())
    resumed = lowbit.AdamW([{"params": ps[:2]}, {"params": ps[2:]}], min_numel=0)
    resumed.load_state_dict(tree["training"]["optimizer"])
    for p in ps:  # the codes of a block may be one exponent apart, its values not
        for x, y in zip(lowbit.decode(optimizer, p), lowbit.decode(resumed, p), strict=True):
            assert torch.equal(x, y)
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_of_torchao(tmp_path, cli):
    p = parameter(64, 128)
    optimizer = torchao.optim.AdamW8bit([p], lr=1e-2)
    with torch.compiler.set_stance("force_eager"):
        run(optimizer, [p], 2)
    torch.save(optimizer.state_dict(), tmp_path / "old.pt")
    status, out, _ = cli("inspect", tmp_path / "old.pt")
    assert status == 0 and "torchao OptimState8bit" in out
    assert cli("convert", tmp_path / "old.pt", tmp_path / "new.pt", "--to", "torch")[0] == 0
    state = torch.load(tmp_path / "new.pt", weights_only=True)["state"][0]
    assert same_bits(state["exp_avg"], optimizer.state[p]["exp_avg"].dequantize(torch.float32))


def test_four_bits_from_the_command_line_need_the_model(tmp_path, cli):
    folder = tiny.write_model(tmp_path / "model")
    net = AutoModelForCausalLM.from_pretrained(folder)
    ps = list(net.parameters())
    optimizer = lowbit.AdamW4bit(ps)
    run(optimizer, ps, 1)
    torch.save(optimizer.state_dict(), tmp_path / "old.pt")
    status, _, error = cli("convert", tmp_path / "old.pt", tmp_path / "new.pt", "--to", "torch")
    assert status == 2 and "--model" in error and not (tmp_path / "new.pt").exists()
    assert cli("convert", tmp_path / "old.pt", tmp_path / "new.pt", "--to", "torch", "--model", folder)[0] == 0
    state = torch.load(tmp_path / "new.pt", weights_only=True)["state"]
    assert all(same_bits(state[i]["exp_avg"], lowbit.decode(optimizer, p)[0]) for i, p in enumerate(ps))


def test_inspect_counts(tmp_path, cli):
    """Blocks of one value and 31 zeros: known shares of codes."""
    p = torch.nn.Parameter(torch.zeros(128, 64))
    optimizer = lowbit.AdamW8bit([p], betas=(0.9, 0.99))
    p.grad = torch.zeros(128, 64)
    p.grad[:, ::32] = 1.0
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    status, out, _ = cli("inspect", tmp_path / "x.pt")
    assert status == 0
    cells = [cell.strip() for cell in out.splitlines()[3].strip("│ ").split("│")]
    assert cells[:5] == [".", "8bit", "1", "1", "0.02"]
    assert cells[5] == "96.88%" and cells[7] == "96.88%"


BROKEN = {
    "absent.pt": (None, "there is no"),
    "empty.pt": (b"", "can't be read"),
    "half.pt": ("half", "can't be read"),
    "foreign.pt": ({"model": {"w": torch.zeros(3)}}, "no optimizer's state dict"),
    "foreign.safetensors": ("foreign", "not written by lowbit"),
    "folder": ("folder", "no .metadata"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name, tmp_path, cli):
    content, message = BROKEN[name]
    path = tmp_path / name
    if content == "half":
        torch.save(trained()[1].state_dict(), path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif content == "foreign":
        from safetensors.torch import save_file

        save_file({"w": torch.zeros(3)}, path)
    elif content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    for arguments in (("inspect", path), ("convert", path, tmp_path / "new.pt", "--to", "8bit")):
        status, _, error = cli(*arguments)
        assert status == 2 and message in error and name in error and error.count("\n") == 1
    assert not (tmp_path / "new.pt").exists()


def test_writing_never_destroys(tmp_path):
    """A write that fails leaves the old file; safetensors refuses what it can't hold, by name."""
    path = tmp_path / "x.safetensors"
    files.write({"a": randn(3)}, path)
    with pytest.raises(ValueError, match="b/c, a set"):
        files.write({"b": {"c": {1}}}, path)
    assert same_bits(files.read(path)["a"], randn(3))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="exists"):
        files.write({}, tmp_path / "folder")
