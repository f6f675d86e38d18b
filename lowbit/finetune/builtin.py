"""The built-in task: a small Llama that learns what the functions of Python's library do, without a download.

Text, records and questions come from :mod:`lowbit.finetune.pydocs`, so they are the same for a given Python version.
"""

import random

import torch

from lowbit.finetune.errors import UserError
from lowbit.finetune.pydocs import docs, topics

# What `lowbit bench` takes by default for this model: about half a minute an optimizer on two CPU cores.
LR, BATCH, MAX_LENGTH, STEPS = 2e-3, 8, 256, 400

VOCABULARY, WIDTH, LAYERS, HEADS = 2048, 128, 2, 4
END = "<|end|>"
FEWEST = 150  # documented functions; a Python with docstrings has over two hundred
EXCHANGE, TIMES = 3, 3  # questions in a record that is a dialogue, dialogues that each function is in
ANSWERS, QUESTIONS = 4, 120
ALIKE = 40  # descriptions of like length among which false answers are drawn


def build(seed):
    """``(model, tokenizer)``: a Llama of 0.95 M parameters in fp32, random by ``seed``, and a BPE tokenizer.

    No random generator of the caller is used.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, tokenizer = skeleton()
    return model.float().eval(), tokenizer


def skeleton():
    """As :func:`build`, random by torch's own generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


def _tokenizer():
    """A byte-level BPE tokenizer trained on the task's own text, with one special token, :data:`END`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)


def _corpus():
    """The text that the tokenizer is trained on: what it will meet most, most often."""
    from lowbit.finetune.data import prompt
    from lowbit.finetune.evaluation import QA_PROMPT

    yield from topics().values()
    for record in records():
        yield prompt(record) + record["output"]
    yield from [QA_PROMPT] * 100


def records():
    """Instruction records in Alpaca's format: one on every third documented function, and dialogues on all of them."""
    known, chance = _documented(), random.Random(0)
    single = [{"instruction": _question(doc), "input": doc.signature, "output": doc.text} for doc in known[::3]]
    return single + [_dialogue(talk) for _ in range(TIMES) for talk in _groups(chance.sample(known, len(known)))]


def _groups(known):
    return [known[i : i + EXCHANGE] for i in range(0, len(known), EXCHANGE)]


def _dialogue(talk):
    exchanges = [f"Q: {_question(doc)}\nA: {doc.text}" for doc in talk]
    return {"instruction": "Ask and answer questions about Python.", "input": "", "output": "\n\n".join(exchanges)}


def questions():
    """Questions in the form of TruthfulQA's mc_task.json: which description is that of a function?

    The false answers describe functions of other modules, and come from the same stretch of descriptions by length, so
    that length tells nothing.
    """
    known, chance = sorted(_documented(), key=lambda doc: (len(doc.text), doc.name)), random.Random(0)
    asked = []
    for i in chance.sample(range(len(known)), QUESTIONS):
        doc, start = known[i], i - i % ALIKE
        others = [other for other in known[start : start + ALIKE] if _module(other) != _module(doc)]
        answers = {doc.text: 1} | {other.text: 0 for other in chance.sample(others, ANSWERS - 1)}
        asked.append({"question": _question(doc), "mc1_targets": answers, "mc2_targets": answers})
    return asked


def _question(doc):
    return f"What does {doc.name} do?"


def _module(doc):
    return doc.home.split(".")[0]


def _documented():
    found = docs()
    if len(found) < FEWEST:
        raise UserError("this Python has no docstrings (python -OO?), which the built-in data need: give --data")
    return found
