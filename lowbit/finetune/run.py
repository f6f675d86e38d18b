"""From options to a trained and evaluated model: what ``finetune`` and the workers of ``bench`` share."""

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.bench import peers
from lowbit.finetune import checkpoints, harness, liger, loggers, processes
from lowbit.finetune.data import load_split, tokenize
from lowbit.finetune.errors import UserError
from lowbit.finetune.evaluation import held_out_loss, load_questions, multiple_choice
from lowbit.finetune.model import cast, load_model
from lowbit.finetune.options import device_of
from lowbit.finetune.train import train


@dataclass(frozen=True)
class Setup:
    """Model, data and questions of a run."""

    model: torch.nn.Module
    tokenizer: object
    device: torch.device
    examples: list
    held_out: list
    questions: list
    autocast: torch.dtype | None = None  # dtype to compute in where the weights are wider
    tasks: harness.Tasks | None = None

    @property
    def pad_id(self):
        """Token that fills batches up."""
        return self.tokenizer.pad_token_id

    def fingerprint(self):
        """A hash of the training data as tokens."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(array("q", [len(example.input_ids), *example.input_ids, *example.labels]))
        return digest.hexdigest()


def prepare(options, peer=None, checkpoint=None):
    """Load everything that :class:`Options` name, with the weights that ``peer`` trains, of a checkpoint if given."""
    loggers.check(options)
    device = device_of(options)
    dtype = getattr(torch, options.dtype)
    train_records, held_out = load_split(options.data, options.held_out)
    questions = [] if options.eval_data == "none" else load_questions(options.eval_data)[: options.eval_limit]
    tasks = harness.find(options.tasks)
    wide = peer is not None and peer.fp32_weights
    place = device if processes.count() == 1 else "cpu"  # from where shards come to their devices
    if checkpoint:
        model, tokenizer = load_model(
            str(checkpoint), dtype=torch.float32 if wide else dtype, device=place, seed=options.seed
        )
    else:
        model, tokenizer = load_model(
            options.model, dtype=dtype, device=place, seed=options.seed, from_scratch=options.from_scratch
        )
    if wide:
        cast(model, torch.float32)  # from the weights that the others start from, rounded to --dtype like theirs
    if options.liger:
        liger.apply(model, device)
    processes.shard(model, device.type, options.replicas)
    examples, tests = (
        tokenize(part, tokenizer, options.max_length, options.train_on_all) for part in (train_records, held_out)
    )
    return Setup(
        model, tokenizer, device, examples, tests, questions, dtype if wide and dtype != torch.float32 else None, tasks
    )


def build_optimizer(peer, model, options):
    """The optimizer of a peer over all parameters of a model that train."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (options.beta1, options.beta2)
    return peer.build(parameters, options.lr, betas, options.eps, options.weight_decay, options.seed)


def evaluate(setup, options, progress=None):
    """``{"held_out_loss", "mc1", "mc2", "tasks"}``, None where there is nothing to evaluate on.

    ``tasks`` is as :func:`lowbit.finetune.harness.run` returns it. ``progress(done, total)`` counts answers.
    """
    setup.model.eval()
    result = {"held_out_loss": None, "mc1": None, "mc2": None, "tasks": None}
    with torch.no_grad(), torch.autocast(setup.device.type, setup.autocast, enabled=setup.autocast is not None):
        if setup.held_out:
            result["held_out_loss"] = held_out_loss(
                setup.model, setup.held_out, setup.pad_id, batch_size=options.batch_size
            )
        if setup.questions:
            result |= multiple_choice(setup.model, setup.tokenizer, setup.questions, progress=progress)
    if setup.tasks:
        result["tasks"] = harness.run(
            setup.tasks, setup.model, setup.tokenizer, batch_size=options.batch_size, limit=options.eval_limit,
            autocast=setup.autocast,
        )  # fmt: skip
    return result


def finetune(options, on_start=None, on_step=None):
    """Fine-tune as :class:`FinetuneOptions` say; returns ``(TrainResult, evaluation, path of the last checkpoint)``.

    ``on_start(setup)`` is called before the first step, ``on_step(training)`` after each. Under torchrun all processes
    call it together.
    """
    with processes.together(options):
        return _finetune(options, on_start, on_step)


def _finetune(options, on_start, on_step):
    peer = peers.find(options.optimizer)
    checkpoint = None
    if options.resume:
        checkpoint = checkpoints.newest(options.out, options)
    elif checkpoints.whole(options.out):
        raise UserError(f"{options.out} holds checkpoints of another run: add --resume, or give another --out")
    setup = prepare(options, peer, checkpoint)
    if on_start:
        on_start(setup)
    with loggers.opened(options, Path(options.out) / "logs" / options.optimizer, checkpoint) as log:
        result, saved = fit(setup, peer, options, options.out, on_step, checkpoint, save_last=True, log=log)
        evaluation = evaluate(setup, options)
        log.write(result.steps, evaluation or {})
    return result, evaluation, saved


def fit(setup, peer, options, folder, on_step=None, checkpoint=None, save_last=False, log=None):
    """Train from the start or from a checkpoint; returns ``(TrainResult, path of the last checkpoint or None)``.

    Saves into ``folder`` every ``options.save_every`` steps, if that is set, and after the last if ``save_last``.
    What is measured on the way goes to ``log``, a :class:`lowbit.finetune.loggers.Log`.
    """
    fingerprint = setup.fingerprint()
    state = checkpoints.load_state(checkpoint, fingerprint) if checkpoint else None
    saved = checkpoint

    def after_step(run):
        nonlocal saved
        if on_step:
            on_step(run)
        if log:
            log.step(run)
        due = options.save_every and run.step % options.save_every == 0 and run.step < run.total
        if due or (save_last and run.step == run.total):
            with run.throughput.pause():
                saved = checkpoints.save(folder, run, setup.tokenizer, options, fingerprint)

    result = train(
        setup.model, build_optimizer(peer, setup.model, options), setup.examples, setup.pad_id, options,
        autocast=setup.autocast, on_step=after_step, resume=state,
    )  # fmt: skip
    return result, saved
