"""Whole training steps of a large model on one GPU: tokens a second and peak memory, once per optimizer.

    python benchmarks/end_to_end.py --json benchmarks/results/end-to-end-h200.json

Llama2-7B's shape with random weights in bf16, layers compiled, activations recomputed, batches of examples as long as
Alpaca's; the training loop is that of ``lowbit finetune``. Each optimizer runs in a process of its own; before them
all a run that does not count fills the caches in which the model's compiled layers are found.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from lowbit.bench import machine, peers
from lowbit.finetune.data import Example
from lowbit.finetune.options import BenchOptions, resolve
from lowbit.finetune.train import train

LAYERS = 32
VOCABULARY = 32000
# tokens of an Alpaca example in its prompt template, cut at 512: minimum, deciles, maximum (SmolLM2's tokenizer)
LENGTHS = (37, 58, 68, 75, 85, 97, 111, 127, 146, 178, 512)
OPTIMIZERS = (
    "torch", "bitsandbytes-8bit", "torchao-8bit", "torchao-4bit", "flashoptim", "8bit", "4bit", "12bit", "8bit+24bit",
)  # fmt: skip
FILLS = "torch"  # the optimizer of the run that does not count


def examples(count, seed=0):
    """Random tokens, as many as Alpaca's examples have; all count in the loss."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for place in (torch.rand(count, generator=generator) * (len(LENGTHS) - 1)).tolist():
        low, part = int(place), place % 1
        length = round(LENGTHS[low] + part * (LENGTHS[low + 1] - LENGTHS[low]))
        ids = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        found.append(Example(ids, ids))
    return found


def model(layers, device="cuda"):
    """Llama2-7B with random bf16 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers,
        num_attention_heads=32, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)


def options_of(steps, batch_size):
    """How the training goes."""
    return resolve(BenchOptions(steps=steps, batch_size=batch_size, lr=1e-5, compile=True, checkpointing=True))


def measure(name, arguments):
    """One optimizer, in this process."""
    options = options_of(arguments.steps, arguments.batch_size)
    network = model(arguments.layers)
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = peers.find(name).build(parameters, options.lr, (0.9, 0.999), 1e-8, 0.0, 0)
    result = asdict(train(network, optimizer, examples(arguments.steps * arguments.batch_size), 0, options))
    result.pop("losses")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments)))
        return
    device = torch.device("cuda")
    settings = {"layers": arguments.layers, "batch_size": arguments.batch_size, "steps": arguments.steps}
    report = {"machine": machine.machine(device), "versions": machine.versions(), **settings, "results": []}
    print(f"{'optimizer':20}{'tokens/s':>10}{'peak GiB':>10}{'step ms':>10}{'first s':>10}")
    for name in (None, *arguments.optimizers):
        command = [sys.executable, __file__, "--worker", name or FILLS, "--layers", str(arguments.layers)]
        command += ["--steps", str(arguments.steps), "--batch-size", str(arguments.batch_size)]
        done = subprocess.run(command, capture_output=True, text=True)
        if name is None:
            continue
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
            report["results"].append({"name": name, "failed": reason})
            print(f"{name:20} failed: {reason}", flush=True)
        else:
            row = {"name": name, **json.loads(done.stdout.strip().splitlines()[-1])}
            report["results"].append(row)
            print(
                f"{name:20}{row['tokens_per_second']:10.0f}{row['max_memory'] / 2**30:10.1f}"
                f"{row['optimizer_step'] * 1e3:10.1f}{row['optimizer_first_step']:10.2f}",
                flush=True,
            )
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
