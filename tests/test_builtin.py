"""The built-in task: the same on every run, well formed, and nothing is disturbed by making it."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from lowbit.finetune import builtin, pydocs
from lowbit.finetune.data import load_records, prompt, tokenize
from lowbit.finetune.errors import UserError
from lowbit.finetune.evaluation import QA_PROMPT, held_out_loss, load_questions
from lowbit.finetune.model import load_model


@pytest.fixture(scope="module")
def built():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, tokenizer = load_model("builtin", dtype=torch.float32, seed=2024)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random numbers are untouched
    return model, tokenizer


def test_weights_are_decided_by_the_seed(built):
    same, other = builtin.build(2024)[0], builtin.build(7)[0]
    weights = built[0].state_dict()
    assert all(torch.equal(weights[name], value) for name, value in same.state_dict().items())
    assert not torch.equal(weights["lm_head.weight"], other.state_dict()["lm_head.weight"])


def test_text_does_not_depend_on_the_process(built):
    script = (
        "import json; from lowbit.finetune import builtin as b;"
        "print(json.dumps([b.records(), b.questions(), b.build(1)[1].get_vocab()]))"
    )
    for_another = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=for_another, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [builtin.records(), builtin.questions(), built[1].get_vocab()]


def test_collecting_the_text_has_no_effects():
    """No output, no window, no browser, no thread: only functions' documentation is looked at."""
    script = (
        "import sys, threading; from lowbit.finetune import pydocs; pydocs.docs(); pydocs.topics();"
        "assert threading.active_count() == 1; bad = {'antigravity', 'this', 'tkinter', 'turtle', 'idlelib'};"
        "assert not bad & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_said_of_functions_is_their_documentation():
    known = {doc.name: doc for doc in pydocs.docs()}
    assert known["math.sqrt"].text == "Return the square root of x."
    assert known["str.lower"].text == "Return a copy of the string converted to lowercase."
    assert known["str.lower"].home == "str"
    assert "iterable" in known["math.prod"].signature and known["math.prod"].signature.startswith("math.prod(")
    for doc in known.values():
        assert pydocs.SHORTEST <= len(doc.text) <= pydocs.LONGEST + 1 and doc.text.endswith((".", "!", "?"))
        assert "\n" not in doc.text and "0x" not in doc.signature


@pytest.mark.parametrize(
    "docstring, sentence",
    [
        ("Return it.\n\nMore.", "Return it."),
        ("f(x) -> y\n\nReturn the\n  same y. Then more.", "Return the same y."),
        ("Return a pair\n\nof", "Return a pair."),
        ("see f", ""),
        ("f(x)", ""),
        ("Lives at 0x7f001", ""),
    ],
)
def test_the_first_sentence(docstring, sentence):
    assert pydocs._sentence(docstring) == sentence


def test_records_are_valid_and_fit(built):
    _, tokenizer = built
    records = load_records("builtin")
    assert records == builtin.records() and len(records) > 200
    examples = tokenize(records, tokenizer, builtin.MAX_LENGTH)
    assert len(examples) == len(records)
    whole = tokenize(records, tokenizer, 10**6)
    cut = sum(len(a.input_ids) != len(b.input_ids) for a, b in zip(examples, whole))
    assert cut < len(records) / 50
    for record, example in zip(records[::40], whole[::40]):
        text = tokenizer.decode(example.input_ids)
        assert text == prompt(record) + record["output"] + builtin.END


def test_the_tokenizer_loses_nothing(built):
    _, tokenizer = built
    assert len(tokenizer) == builtin.VOCABULARY and tokenizer.pad_token_id is not None
    for text in (QA_PROMPT, "naïve 'text'\t\n  of ∑ 日本 \N{SNAKE} code", "  spaces  "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(QA_PROMPT).input_ids) < 200  # it has met the evaluation's prompt


def test_questions_have_one_answer_that_length_does_not_give_away():
    questions = load_questions("builtin")
    texts = {doc.text: doc for doc in pydocs.docs()}
    names = {f"What does {doc.name} do?": doc for doc in pydocs.docs()}
    assert len(questions) == builtin.QUESTIONS == len({q.question for q in questions})
    ranks = Counter()
    for q in questions:
        assert q.mc1 == q.mc2 and len(q.mc1) == builtin.ANSWERS and sum(q.mc1.values()) == 1
        (true,) = (answer for answer, label in q.mc1.items() if label)
        assert names[q.question].text == true
        homes = [texts[answer].home.split(".")[0] for answer in q.mc1 if answer != true]
        assert names[q.question].home.split(".")[0] not in homes
        ranks[sorted(q.mc1, key=lambda answer: (len(answer), answer)).index(true)] += 1
    assert max(ranks.values()) < 0.4 * builtin.QUESTIONS and min(ranks.values()) > 0.12 * builtin.QUESTIONS


def test_every_question_is_about_something_that_is_taught():
    taught = "\n".join(record["instruction"] + "\n" + record["output"] for record in builtin.records())
    for q in builtin.questions():
        assert q["question"] in taught and next(iter(q["mc1_targets"])) in taught


def test_the_untrained_model_knows_nothing(built):
    model, tokenizer = built
    examples = tokenize(builtin.records()[:40], tokenizer, builtin.MAX_LENGTH)
    expected = torch.tensor(float(builtin.VOCABULARY)).log().item()
    assert held_out_loss(model, examples, tokenizer.pad_token_id) == pytest.approx(expected, abs=0.15)


def test_a_python_without_docstrings_says_so(monkeypatch):
    monkeypatch.setattr(builtin, "docs", lambda: pydocs.docs()[:10])
    with pytest.raises(UserError, match="no docstrings"):
        builtin.records()


def test_the_model_survives_saving(built, tmp_path):
    model, tokenizer = built
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokens = load_model(str(tmp_path), dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    text = json.dumps(builtin.records()[0])
    assert tokens(text).input_ids == tokenizer(text).input_ids
    assert tokens.pad_token_id == tokenizer.pad_token_id and tokens.eos_token_id == tokenizer.eos_token_id
    assert again.config.use_cache is False and not again.training
