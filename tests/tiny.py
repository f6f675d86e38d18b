"""A tiny model, data and questions in files, for tests that start processes."""

import json

import torch

from lowbit.finetune.options import resolve

WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "bird", "tree")


def llama(dtype, vocab_size=257, **options):
    """A random Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=0, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def write_model(folder):
    """A random Llama of two layers with a tokenizer of bytes; returns its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["</s>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    llama(torch.bfloat16, vocab_size=len(letters) + 1).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder)
    return str(folder)


def records(count=40):
    """Alpaca records of which word follows which."""
    return [
        {"instruction": f"Say {WORDS[i % 10]}.", "input": "", "output": " ".join([WORDS[i % 10]] * (1 + i % 3))}
        for i in range(count)
    ]


def write_json(path, value):
    """A JSON file; returns its path."""
    path.write_text(json.dumps(value))
    return str(path)


def questions(count=3):
    """Multiple-choice questions in the form of TruthfulQA's mc_task.json."""
    return [
        {
            "question": f"What is {WORDS[i]}?",
            "mc1_targets": {WORDS[i]: 1, WORDS[i + 1]: 0},
            "mc2_targets": {WORDS[i]: 1, WORDS[i + 1]: 0},
        }
        for i in range(count)
    ]


def write_all(folder):
    """Options of the command line for model, data and questions written into a folder."""
    model, data = write_model(folder / "model"), write_json(folder / "data.json", records())
    asked = write_json(folder / "mc_task.json", questions())
    return [
        "--model", model, "--data", data, "--eval-data", asked, "--steps", "4", "--batch-size", "4", "--max-length",
        "256", "--lr", "0.01", "--device", "cpu",
    ]  # fmt: skip


def options_of(kind, setting, **more):
    """The arguments of :func:`write_all` as options of a class of :mod:`lowbit.finetune.options`, resolved."""
    given = dict(zip([x[2:].replace("-", "_") for x in setting[::2]], setting[1::2], strict=True))
    types = {"steps": int, "batch_size": int, "max_length": int, "lr": float}
    return resolve(kind(**{name: types.get(name, str)(x) for name, x in given.items()} | more))


class Stopped(Exception):
    """Stands for a kill."""


def stop_at(step):
    """A function that a run calls after each step, and that ends it there."""

    def on_step(run):
        if run.step == step:
            raise Stopped

    return on_step
