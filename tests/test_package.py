"""The package as installed: what it imports, where Triton or a compiler is absent, and that it is documented."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import assert_same_state, parameter, run, same_bits

import lowbit
from lowbit.backends import Backend, compiled

CORE = [
    path for path in Path(lowbit.__file__).parent.rglob("*.py") if not {"finetune", "bench", "files"} & set(path.parts)
]
CORE = [path for path in CORE if path.name not in ("cli.py", "__main__.py")]


def in_a_process(code):
    """What a new Python prints for ``code``."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_torch_alone():
    """What the extras bring is not imported, nor what torch itself leaves for later."""
    code = "import sys, torch; before = set(sys.modules); import lowbit; print(*sorted(set(sys.modules) - before))"
    added = {name.split(".")[0] for name in in_a_process(code).split()}
    extras = "transformers tokenizers datasets accelerate gguf typer rich matplotlib numpy psutil safetensors torchao"
    assert "lowbit" in added and not added & set(extras.split())


def test_core_imports_are_the_standard_librarys_and_torchs():
    allowed = sys.stdlib_module_names | {"torch", "triton", "lowbit"}
    for path in CORE:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and (words[0] == "import" or (words[0] == "from" and "import" in words)):
                assert words[1].rstrip(",").split(".")[0] in allowed, (path.name, line)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, lowbit
torch.set_num_threads(1)
from lowbit import ops
assert ops.triton is None
for state in ("8bit", "4bit", "12bit", "bf16", "fp32"):
    p = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 64).view(64, 64).bfloat16())
    optimizer = lowbit.AdamW([p], state=state, weights="24bit")
    p.grad = torch.linspace(-2, 1, 64 * 64).view(64, 64).bfloat16()
    optimizer.step()
    words = [x.reshape(-1).view(torch.uint8).int().sum().item() for x in (p.detach(), *optimizer.state[p].values())]
    print(state, *words)
"""


def test_without_triton_the_same_bits():
    with_triton = WITHOUT_TRITON.replace('sys.modules["triton"] = None', "").replace("ops.triton is None", "ops.triton")
    lines = in_a_process(WITHOUT_TRITON)
    assert len(lines.splitlines()) == 5
    assert lines == in_a_process(with_triton)


def test_public_names_are_documented():
    assert "AdamW" in lowbit.__all__ and sorted(lowbit.__all__) == lowbit.__all__
    for name in lowbit.__all__:
        value = getattr(lowbit, name)
        assert name == "__version__" or inspect.getdoc(value), name
    for name in ("step", "load_state_dict", "add_param_group", "init_states", "summary"):
        assert getattr(lowbit.AdamW, name).__doc__, name
    for option in inspect.signature(lowbit.AdamW).parameters:
        assert f"{option}" in lowbit.AdamW.__doc__, option


def test_compiled_is_eager():
    """One compilation for a regular and a ragged shape: codes and scales equal, weights within one ulp."""
    shapes = ((64, 96), (70, 65), (4, 5, 230), (3,))
    results = []
    for backend in ("eager", "compiled"):
        ps = [parameter(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate(shapes)]
        optimizer = lowbit.AdamW8bit(ps, lr=1e-2, backend=backend)
        run(optimizer, ps, 1)
        results.append((ps, optimizer))
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run(results[1][1], results[1][0], 1, first=1)
    results[1][1].param_groups[0]["lr"] = 3e-3
    run(results[1][1], results[1][0], 1, first=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames > 0  # nothing compiles again
    run(results[0][1], results[0][0], 1, first=1)
    results[0][1].param_groups[0]["lr"] = 3e-3
    run(results[0][1], results[0][0], 1, first=2)
    for p, q in zip(results[0][0], results[1][0], strict=True):
        assert_same_state(results[0][1].state[p], results[1][1].state[q])
        difference = p.detach().view(torch.int16).int() - q.detach().view(torch.int16).int()
        assert difference.abs().max() <= 1


def test_small_models_are_not_compiled():
    assert Backend("auto").choose(torch.device("cpu"), 1000) == "eager"
    assert Backend("eager").choose(torch.device("cpu"), 1 << 40) == "eager"
    assert Backend("compiled").choose(torch.device("cpu"), 1) == "compiled"


def test_no_compiler_no_compilation(monkeypatch):
    big = compiled.WORTH_COMPILING
    monkeypatch.setattr(compiled, "available", lambda device: False)
    assert Backend("auto").choose(torch.device("cpu"), big) == "eager"
    monkeypatch.setattr(compiled, "available", lambda device: True)
    assert Backend("auto").choose(torch.device("cpu"), big) == "compiled"


def broken(*arguments):
    """An updater whose compilation fails."""

    def update(*tiles):
        raise torch._dynamo.exc.BackendCompilerFailed(broken, RuntimeError("no compiler"), None)

    return update


def test_where_compiling_fails_eager_serves(monkeypatch, caplog):
    """It says so once, and the step is the eager one; where the user asked for ``compiled``, it is his error."""
    monkeypatch.setattr(compiled, "updater", broken)
    monkeypatch.setattr(compiled, "available", lambda device: True)
    monkeypatch.setattr(compiled, "WORTH_COMPILING", 1)
    p, q = parameter(64, 64), parameter(64, 64)
    optimizer, other = lowbit.AdamW([p]), lowbit.AdamW([q], backend="eager")
    with caplog.at_level("WARNING", logger="lowbit"):
        run(optimizer, [p], 2)
    run(other, [q], 2)
    assert caplog.text.count("torch.compile failed") == 1
    assert same_bits(p, q)
    assert_same_state(optimizer.state[p], other.state[q])
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="no compiler"):
        run(lowbit.AdamW([p], backend="compiled"), [p], 1)


def test_tables_of_the_documentation_are_what_the_results_say():
    script = Path(__file__).parent.parent / "benchmarks" / "docs.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
