"""Recipes name options that exist and optimizers that can be built; what is given on the command line wins."""

from dataclasses import fields

import pytest
import torch

from lowbit.bench import bench as module
from lowbit.bench import peers
from lowbit.bench.recipes import RECIPES
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import BenchOptions, resolve


@pytest.fixture
def chosen(monkeypatch, cli):
    """``chosen(*arguments)``: the options that ``lowbit bench`` would run with."""

    def run(*arguments):
        found = []
        monkeypatch.setattr(module, "bench", lambda options, console: found.append(options) or 0)
        assert cli("bench", *arguments)[0] == 0
        return found[0]

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_run(name, chosen):
    options = resolve(chosen("--recipe", name))
    types = {field.name: type(getattr(options, field.name)) for field in fields(BenchOptions)}
    assert all(types[option] is type(value) for option, value in RECIPES[name].items())
    assert all(getattr(options, option) == value for option, value in RECIPES[name].items())
    assert peers.names(options.optimizers) == options.optimizers.split(",")


def test_the_command_line_wins(chosen):
    options = chosen("--recipe", "llama2-7b-alpaca", "--lr", "1e-4", "--steps", "20", "--no-compile", "--seed", "2024")
    assert (options.lr, options.steps, options.epochs, options.compile) == (1e-4, 20, None, False)
    assert options.model == "meta-llama/Llama-2-7b-hf" and options.batch_size == 16
    assert chosen().model == "builtin"


def test_an_unknown_recipe_is_refused_with_those_there_are(cli):
    status, _, error = cli("bench", "--recipe", "llama3")
    assert status == 2 and "choose one of llama2-7b-alpaca, smollm2-alpaca" in error


def test_lpmm_says_what_it_cannot_do():
    weights = [torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))]
    with pytest.raises(UserError, match="no bf16 weights"):
        peers.find("lpmm-4bit").build(weights, 1e-3, (0.9, 0.999), 1e-8, 0.0, 0)
    with pytest.raises(UserError, match="pip install git"):
        peers.find("lpmm-4bit").build([torch.nn.Parameter(torch.ones(4))], 1e-3, (0.9, 0.999), 1e-8, 0.0, 0)
