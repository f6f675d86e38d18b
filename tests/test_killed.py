"""A process killed at any moment of a save leaves a checkpoint that loads."""

import json
import subprocess
import sys
from pathlib import Path

KILLS = 50

# forks, so that 50 processes need not import torch 50 times; one thread, so that a fork has all of its threads
PROGRAM = """
import json, os, random, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

import torch

torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import lowbit
from lowbit.finetune import checkpoints
from lowbit.finetune.options import FinetuneOptions

logging.disable_progress_bar()  # whose lock is shared: a killed process would keep it
folder = Path(sys.argv[1])
source = tiny.write_model(folder / "model")
model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
optimizer = lowbit.AdamW4bit(model.parameters())
optimizer.init_states()
run = SimpleNamespace(model=model, step=0)
run.state_dict = lambda: {"optimizer": optimizer.state_dict(), "step": run.step}
options, out = FinetuneOptions(), folder / "out"


def save():
    run.step += 1
    for state in optimizer.state.values():
        state["step"].fill_(run.step)
    checkpoints.save(out, run, tokenizer, options, "data")


save()
start = time.perf_counter()
save()
one = time.perf_counter() - start
random.seed(0)
found, partial = [], 0
for _ in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        while True:
            save()
    time.sleep(random.uniform(0, 6 * one))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    partial += any(out.glob("*.partial"))
    newest = checkpoints.newest(out, options)
    state = checkpoints.load_state(newest, "data")
    AutoModelForCausalLM.from_pretrained(newest)
    AutoTokenizer.from_pretrained(newest)
    lowbit.AdamW4bit(model.parameters()).load_state_dict(state["optimizer"])
    assert newest.name == f"step-{state['step']:06d}" and state["optimizer"]["state"][0]["step"] == state["step"]
    found.append(state["step"])
    run.step = state["step"]
print(json.dumps({"found": found, "partial": partial}))
"""


def test_killed_fifty_times_while_saving(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["found"]) == KILLS and result["found"] == sorted(result["found"])
    assert result["found"][-1] > 10 and result["partial"] > 5  # it went on, and was killed inside saves
