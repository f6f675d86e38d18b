"""Time and memory of one optimizer step, ours beside the others, each in a process of its own with fresh caches.

    python benchmarks/step.py                                  # 64 M bf16 parameters on this machine's CPU
    python benchmarks/step.py --device cuda --shapes llama2-7b gpt2-124m --json benchmarks/results/step.json

Columns: median ms of a step (of the device with the host ahead, as in training, and of the wall clock with the queue
drained before and after), bytes moved a second against a copy's, wall seconds of the first step with cold and with warm
compile caches, bytes of state and of temporary memory a parameter.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # run as a script from anywhere

from shapes import SHAPES  # noqa: E402

from lowbit.bench import peers  # noqa: E402
from lowbit.finetune.memory import state_bytes  # noqa: E402

LR = 1e-5
WORTH_WARMING = 0.5  # seconds of a first step; below there was nothing to compile
PROCESSES = multiprocessing.get_context("forkserver")  # fresh ones, forked where imports are done and no device is used
PROCESSES.set_forkserver_preload(["torch", "lowbit"])


def _torch(**options):
    return lambda params: torch.optim.AdamW(params, lr=LR, **options)


def _lowbit(**options):
    def make(params):
        import lowbit

        return lowbit.AdamW(params, lr=LR, **options)

    return make


def _other(*names, **options):
    peer = peers.other(*names, **options)
    return lambda params: peer.build(params, LR, (0.9, 0.999), 1e-8, 1e-2, 0)


def _optimi(params):
    import optimi

    return optimi.AdamW(params, lr=LR, triton=params[0].is_cuda)


OPTIMIZERS = {
    "torch-fused": _torch(fused=True),
    "torch-foreach": _torch(foreach=True),
    "bitsandbytes-8bit": _other("bitsandbytes.optim", "AdamW8bit", "bitsandbytes"),
    "torchao-8bit": _other("torchao.optim", "AdamW8bit", "torchao"),
    "torchao-4bit": _other("torchao.optim", "AdamW4bit", "torchao"),
    "torchao-fp8": _other("torchao.optim", "AdamWFp8", "torchao"),
    "flashoptim": _other("flashoptim", "FlashAdamW", "flashoptim", master_weight_bits=None),
    "flashoptim-24bit": _other("flashoptim", "FlashAdamW", "flashoptim", master_weight_bits=24),
    "optimi-kahan": _optimi,
    "8bit": _lowbit(),
    "8bit-eager": _lowbit(backend="eager"),
    "8bit-compiled": _lowbit(backend="compiled"),
    "4bit": _lowbit(state="4bit"),
    "4bit-eager": _lowbit(state="4bit", backend="eager"),
    "4bit-compiled": _lowbit(state="4bit", backend="compiled"),
    "12bit": _lowbit(state="12bit"),
    "bf16": _lowbit(state="bf16"),
    "8bit+nearest": _lowbit(weights="nearest"),
    "8bit+24bit": _lowbit(weights="24bit"),
    "8bit+32bit": _lowbit(weights="32bit"),
}
ON_CPU = (
    "torch-fused",
    "bitsandbytes-8bit",
    "torchao-8bit",
    "8bit-eager",
    "8bit-compiled",
    "4bit-eager",
    "4bit-compiled",
)
ON_GPU = tuple(name for name in OPTIMIZERS if not name.endswith(("-eager", "-compiled")))


def drain(device):
    """Wait for all queued work of a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def make_parameters(shapes, device, dtype):
    """Parameters with gradients, the same in every process."""
    torch.manual_seed(0)
    params = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02))
        p.grad = torch.empty_like(p).normal_(std=1e-3)
        params.append(p)
    return params


def requested(device):
    """Bytes of all tensors on a GPU, whoever keeps them and wherever; 0 on a CPU, where nobody counts."""
    drain(device)
    return torch.cuda.memory_stats()["requested_bytes.all.current"] if device == "cuda" else 0


def time_steps(optimizer, device, repeats, seconds):
    """Device and wall milliseconds of steps, each timed alone; on a CPU they are the same."""
    on_device, wall = [], []
    end = time.perf_counter() + seconds
    while len(wall) < 3 or (len(wall) < repeats and time.perf_counter() < end):
        drain(device)
        start = time.perf_counter()
        optimizer.step()
        drain(device)
        wall.append((time.perf_counter() - start) * 1e3)
        on_device.append(device_time(optimizer, wall[-1]) if device == "cuda" else wall[-1])
    return on_device, wall


def device_time(optimizer, wall):
    """Milliseconds of a step on the GPU, which is kept busy for twice the ``wall`` time while the host prepares it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * wall * 2e6))  # cycles, at about 2 GHz
    begin.record()
    optimizer.step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(name, shapes, device, dtype, repeats, seconds):
    """Everything about one optimizer, in this process."""
    params = make_parameters(SHAPES[shapes], device, dtype)
    numel = sum(p.numel() for p in params)
    without = requested(device)
    optimizer = OPTIMIZERS[name](params)
    drain(device)
    start = time.perf_counter()
    optimizer.step()
    drain(device)
    result = {"first_step_s": time.perf_counter() - start, "params": numel}
    for _ in range(2):
        optimizer.step()
    result["state_bytes"] = ((requested(device) - without) or state_bytes(optimizer)) / numel
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        drain(device)
        result["temporary_bytes"] = (torch.cuda.max_memory_allocated() - before) / numel
    on_device, wall = time_steps(optimizer, device, repeats, seconds)
    result.update(ms=statistics.median(on_device), wall_ms=statistics.median(wall), fastest_ms=min(on_device))
    result.update(steps=len(wall))
    return result


def copy_speed(device):
    """Bytes read and written a second by a large device copy, the best of ten; the speed that no step can beat."""
    x = torch.empty(1 << 31 if device == "cuda" else 1 << 28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    best = math.inf
    for _ in range(10):
        drain(device)
        start = time.perf_counter()
        y.copy_(x)
        drain(device)
        best = min(best, time.perf_counter() - start)
    return 2 * x.numel() / best


def in_process(name, shapes, arguments, caches):
    """Run :func:`measure` in a fresh process; a failure is a result with its reason."""
    dtype = getattr(torch, arguments.dtype)
    work = (name, shapes, arguments.device, dtype, arguments.repeats, arguments.seconds)
    ours, its = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=send_measured, args=(its, caches, work))
    process.start()
    its.close()
    try:
        return ours.recv() if ours.poll(arguments.limit) else {"failed": f"not done after {arguments.limit} s"}
    except EOFError:
        process.join()
        return {"failed": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def send_measured(pipe, caches, work):
    """:func:`measure` with compile caches of its own, its prattle to nobody."""
    os.environ.update(TRITON_CACHE_DIR=f"{caches}/triton", TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        pipe.send(measure(*work))
    except Exception as error:  # whatever keeps a peer from running is its result
        pipe.send({"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]})


def row(result):
    """A line of the table."""
    if "failed" in result:
        return f"{result['name']:20} failed: {result['failed']}"
    share = result["moved_bytes"] / (result["ms"] * 1e-3) / result["copy_bytes_per_s"]
    return (
        f"{result['name']:20}{result['ms']:10.2f}{result['wall_ms']:10.2f}{share:8.0%}{result['first_step_s']:10.2f}"
        f"{result.get('warm_first_step_s', math.nan):10.2f}{result['state_bytes']:9.3f}"
        f"{result.get('temporary_bytes', math.nan):9.3f}"
    )


def begun(arguments):
    """``(report, values of the rows to come)``; the report is that in ``--json``, to go on with, or a new one.

    A report may have rows of several runs, on machines of one kind with the same versions but of lowbit itself.
    """
    from lowbit.bench.machine import machine, versions

    head = {"machine": machine(torch.device(arguments.device)), "versions": versions(), "dtype": arguments.dtype}
    own = {"lowbit_commit": head["versions"].pop("lowbit_commit", None)}
    own["copy_bytes_per_s"] = copy_speed(arguments.device)
    path = Path(arguments.json or os.devnull)
    if not path.is_file():
        return {**head, "results": []}, own
    report = json.loads(path.read_text())
    others = [f"{name} {there}, not {here}" for name, there, here in compared(report, head) if there != here]
    if others:
        sys.exit(f"{path} is of {'; '.join(others)}: give another --json, or delete it")
    return report, own


def compared(*heads):
    """``(name, value there, value here)`` of what has to be the same in a report."""
    for name in ("cpu", "cores", "gpu", "cuda"):
        yield (name, *(head["machine"].get(name) for head in heads))
    for name in ("versions", "dtype"):
        yield (name, *(head[name] for head in heads))


def run_all(arguments):
    """Every optimizer on every list of shapes, but what the report has; prints as it goes and returns the report."""
    report, own = begun(arguments)
    done = set() if arguments.again else {(row["shapes"], row["name"]) for row in report["results"]}
    names = arguments.optimizers or (ON_GPU if arguments.device == "cuda" else ON_CPU)
    itemsize = getattr(torch, arguments.dtype).itemsize
    for shapes in arguments.shapes:
        numel = sum(math.prod(shape) for shape in SHAPES[shapes])
        copy = own["copy_bytes_per_s"] / 1e9
        print(f"\n{shapes}: {numel / 1e6:.1f} M {arguments.dtype} parameters, copy {copy:.0f} GB/s")
        heads = ("ms", "wall ms", "of copy", "first s", "warm s", "state B", "temp B")
        widths = (10, 10, 8, 10, 10, 9, 9)
        print(f"{'optimizer':20}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
        for name in (name for name in names if (shapes, name) not in done):
            with tempfile.TemporaryDirectory() as caches:
                result = in_process(name, shapes, arguments, caches)
                if arguments.warm and result.get("first_step_s", 0) > WORTH_WARMING:
                    warm = in_process(name, shapes, arguments, caches)
                    result["warm_first_step_s"] = warm.get("first_step_s", math.nan)
            if "failed" not in result:
                result["moved_bytes"] = numel * (3 * itemsize + 2 * result["state_bytes"])
            result = {"shapes": shapes, "name": name, **own, **result}
            report["results"] = [row for row in report["results"] if (row["shapes"], row["name"]) != (shapes, name)]
            report["results"].append(result)
            print(row(result), flush=True)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", nargs="+", default=["64m"], choices=SHAPES)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=30, help="steps timed")
    parser.add_argument("--seconds", type=float, default=20, help="stop timing after this long")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which an optimizer is given up")
    parser.add_argument("--warm", action="store_true", help="also time first steps with warm compile caches")
    parser.add_argument("--again", action="store_true", help="also measure what --json has already")
    parser.add_argument("--json", help="write the results here; go on where the file has some already")
    run_all(parser.parse_args())


if __name__ == "__main__":
    main()
