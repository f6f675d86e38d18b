"""Evaluation against the slow way: one sequence at a time, no cache, no batch, as lm-eval defines it."""

import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from lowbit.finetune.data import Example
from lowbit.finetune.errors import UserError
from lowbit.finetune.evaluation import QA_PROMPT, Question, held_out_loss, load_questions, multiple_choice
from lowbit.finetune.model import logits_at

BEGIN, END = "<begin>", "<end>"


def letters(begins):
    """A tokenizer of one token a byte, which begins texts with a token of its own if ``begins``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([BEGIN, END, *alphabet])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if begins:
        bpe.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=END)


def tiny(kind, positions=2048):
    """A random model in fp32 whose weights are large enough that every position matters."""
    torch.manual_seed(0)
    common = dict(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=positions, initializer_range=0.4, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **common)).eval()
    if kind == "gemma":
        return GemmaForCausalLM(GemmaConfig(num_key_value_heads=1, head_dim=8, **common)).eval()
    if kind == "mamba":  # without a cache of keys and values
        return MambaForCausalLM(MambaConfig(state_size=8, **common)).eval()
    config = GPT2Config(
        vocab_size=258, n_embd=32, n_layer=2, n_head=4, n_positions=positions, initializer_range=0.2,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


QUESTIONS = [
    Question("What is two?", {"A number.": 1, "A fruit, as everyone knows from school": 0}, {"A number.": 1, "No": 0}),
    Question(
        "Is the sky blue on a day without any clouds?",
        {"No": 0, "Yes, it is": 1, "It depends": 0},
        {"Yes, it is": 1, "It depends": 1, "No": 0, "N": 0},
    ),
    Question("Why?", {"B": 1, "A": 0, "C": 0}, {"A": 0, "B": 1}),
]


@torch.no_grad()
def log_likelihood(model, tokenizer, context, continuation):
    """lm-eval 0.4: ``TemplateLM._encode_pair`` and ``HFLM._loglikelihood_tokens`` for one request."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole = tokenizer.encode(context + continuation)
    continuation_ids = whole[len(tokenizer.encode(context)) :]
    ids = torch.tensor([whole[-(model.config.max_position_embeddings + 1) :][:-1]])
    log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, -len(continuation_ids) :].double(), -1)
    return sum(log_p[i, token].item() for i, token in enumerate(continuation_ids))


def reference(model, tokenizer, questions):
    """lm-eval's metrics: ``acc`` of a multiple-choice task, and ``process_results_mc2``."""
    mc1, mc2 = [], []
    for q in questions:
        context = QA_PROMPT.replace("{question}", q.question)
        results = np.array([log_likelihood(model, tokenizer, context, " " + answer) for answer in q.mc1])
        mc1.append(list(q.mc1.values())[np.argmax(results)])
        probs = np.exp(np.array([log_likelihood(model, tokenizer, context, " " + answer) for answer in q.mc2]))
        mc2.append(np.sum((probs / np.sum(probs))[np.array(list(q.mc2.values())) == 1]))
    return {"mc1": np.mean(mc1), "mc2": np.mean(mc2)}


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2", "mamba"])
@pytest.mark.parametrize("begins", [False, True])
def test_multiple_choice_is_lm_evals(kind, begins):
    model, tokenizer = tiny(kind), letters(begins)
    expected = reference(model, tokenizer, QUESTIONS)
    assert 0.01 < expected["mc2"] < 0.99
    for batch_tokens in (1, 2500, 10**6):
        result = multiple_choice(model, tokenizer, QUESTIONS, batch_tokens=batch_tokens)
        assert result == pytest.approx(expected, abs=1e-4), batch_tokens


def test_each_answer_alone_is_lm_evals():
    """mc2 of one true answer against one other gives their log-likelihoods' difference, for every pair."""
    model, tokenizer = tiny("llama"), letters(False)
    answers = ["abc", "No!", "42.", "xyz", "N"]  # near enough in likelihood
    context = QA_PROMPT.replace("{question}", "Why?")
    true = [log_likelihood(model, tokenizer, context, " " + answer) for answer in answers]
    for i in range(len(answers) - 1):
        pair = {answers[i]: 1, answers[i + 1]: 0}
        result = multiple_choice(model, tokenizer, [Question("Why?", pair, pair)])
        assert math.log(result["mc2"] / (1 - result["mc2"])) == pytest.approx(true[i] - true[i + 1], abs=1e-3)


def test_prompts_longer_than_the_model_lose_their_beginning():
    model, tokenizer = tiny("gpt2", positions=64), letters(False)
    result = multiple_choice(model, tokenizer, QUESTIONS)
    assert result == pytest.approx(reference(model, tokenizer, QUESTIONS), abs=1e-4)


def test_no_answer_is_scored_twice_and_progress_ends_at_all():
    model, seen, rows = tiny("llama"), [], []
    model.register_forward_pre_hook(lambda m, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    multiple_choice(model, letters(False), QUESTIONS, batch_tokens=2500, progress=lambda *at: seen.append(at))
    answers = sum(len({*q.mc1, *q.mc2}) for q in QUESTIONS)
    assert seen[-1] == (answers, answers) and sum(rows) == answers + 1  # and the shared prompt once
    assert len(seen) > 1 and seen == sorted(seen)


def test_the_prompt_is_lm_evals():
    filled = QA_PROMPT.format(question="Why?")
    assert filled.startswith("Q: What is human life expectancy in the United States?\nA: Human life expectancy")
    assert filled.count("\n\nQ: ") == 6 and filled.endswith("Barcelona, Spain.\n\nQ: Why?\nA:")
    assert "A: Telescopes use lenses or mirrors to focus light and make objects appear closer.\n" in filled


def test_held_out_loss_is_the_mean_over_target_tokens():
    model = tiny("llama")
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length, prompt in [(5, 2), (40, 39), (17, 0), (33, 1), (8, 8)]:
        ids = torch.randint(0, 258, (length,), generator=generator).tolist()
        examples.append(Example(ids, [-100] * prompt + ids[prompt:]))
    total = count = 0
    with torch.no_grad():
        for example in examples:
            log_p = model(input_ids=torch.tensor([example.input_ids])).logits[0].double().log_softmax(-1)
            for i, label in enumerate(example.labels[1:]):
                if label != -100:
                    total, count = total - log_p[i, label].item(), count + 1
    for batch_size in (1, 2, 16):
        assert held_out_loss(model, examples, 1, batch_size=batch_size) == pytest.approx(total / count, abs=1e-4)
    assert count == 3 + 1 + 16 + 32 + 0
    with pytest.raises(UserError, match="no target tokens"):
        held_out_loss(model, [examples[-1]], 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_at_positions_are_those_of_the_whole_with_their_gradient(kind):
    model = tiny(kind)
    ids = torch.arange(24).view(2, 12)
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([11, 0, 5])
    whole = model(input_ids=ids).logits
    assert torch.allclose(logits_at(model, rows, columns, input_ids=ids), whole[rows, columns], atol=1e-5)
    assert model(input_ids=ids).logits.shape == whole.shape  # the model is as it was


BAD = {
    "no file": (None, "no such file"),
    "wrong json": ("[{]", "line 1, column 3"),
    "empty": ("[]", "not a list of questions"),
    "object": ("{}", "not a list of questions"),
    "no question": ('[{"mc1_targets": {"a": 1}}]', "question 1 has no 'question'"),
    "no targets": ('[{"question": "a", "mc1_targets": {"a": 1}}]', "question 1 has no 'mc2_targets'"),
    "labels": ('[{"question": "a", "mc1_targets": {"a": "yes"}}]', "question 1 has no 'mc1_targets' that maps"),
    "none true": ('[{"question": "a", "mc1_targets": {"a": 0}}]', "no true answer in 'mc1_targets'"),
    "blank answer": ('[{"question": "a", "mc1_targets": {"": 1}}]', "question 1 has no 'mc1_targets' that maps"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_questions_are_named_in_one_line(tmp_path, case):
    text, message = BAD[case]
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        load_questions(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_questions_are_read_as_truthfulqa_writes_them(tmp_path):
    rows = [{"question": q.question, "mc1_targets": q.mc1, "mc2_targets": q.mc2} for q in QUESTIONS]
    (tmp_path / "mc_task.json").write_text(json.dumps(rows))
    assert load_questions(tmp_path / "mc_task.json") == QUESTIONS
