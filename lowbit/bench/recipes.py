"""Runs with a name: options of ``lowbit bench --recipe``. An option that is given on the command line wins."""

from lowbit.finetune.errors import UserError

RECIPES = {
    # torchtune's full_finetune_single_device with llama2/7B_full_low_memory, at batch 16, one epoch: docs/torchtune.md
    "llama2-7b-alpaca": {
        "model": "meta-llama/Llama-2-7b-hf",
        "data": "tatsu-lab/alpaca",
        "eval_data": "none",
        "tasks": "truthfulqa_mc2",
        "train_on_all": True,
        "epochs": 1.0,
        "batch_size": 16,
        "max_length": 512,
        "lr": 1e-5,
        "warmup": 100.0,
        "clip": 0.0,
        "compile": True,
        "checkpointing": True,
        "seed": 2024,
        "log_every": 10,
        "optimizers": "torch,bitsandbytes-8bit,torchao-8bit,torchao-4bit,torchao-fp8,flashoptim,lpmm-4bit,"
        "8bit,4bit,12bit,8bit+24bit",
    },
    "smollm2-alpaca": {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "data": "tatsu-lab/alpaca",
        "eval_data": "none",
        "tasks": "truthfulqa_mc1,truthfulqa_mc2",
        "epochs": 1.0,
        "batch_size": 16,
        "max_length": 512,
        "lr": 1e-4,
        "compile": True,
        "seeds": 5,
        "optimizers": "torch-fp32,torch,8bit,8bit+24bit,4bit,12bit,bitsandbytes-8bit,torchao-8bit,torchao-8bit-nearest,"
        "torchao-4bit,flashoptim,flashoptim-bf16",
    },
}


def recipe(name):
    """Options of a recipe by name; raises :class:`UserError` that lists the names there are."""
    if name not in RECIPES:
        raise UserError(f"unknown --recipe {name!r}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
