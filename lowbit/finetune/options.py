"""Every option of ``lowbit finetune`` and ``lowbit bench``, declared once: default, help and check.

The command line, the job of a worker process, checkpoints and reports all come from these dataclasses.
"""

from dataclasses import dataclass, field, fields, replace

from lowbit.finetune.errors import UserError

PANELS = MODEL, TRAINING, SPEED, RUN = "Model and data", "Training", "Speed and memory", "Run"
LOGGERS = ("tensorboard", "wandb", "trackio", "jsonl")
SCHEDULES = ("cosine", "linear", "constant")
DTYPES = ("bfloat16", "float32")


def option(default, help, panel):
    """A dataclass field with its help text and the panel of ``--help`` that it belongs to."""
    return field(default=default, metadata={"help": help, "panel": panel})


@dataclass(frozen=True)
class TrainConfig:
    """How to train: a step takes ``batch_size * grad_accum`` examples, or rows of several with ``packing``.

    What is None is decided by :func:`resolve`.
    """

    epochs: float | None = option(None, "Passes over the training data. [1; built-in model: its own]", TRAINING)
    steps: int | None = option(None, "Optimizer steps, instead of --epochs.", TRAINING)
    batch_size: int | None = option(
        None, "Examples, with --packing rows, per micro-batch. [16; built-in: its own]", TRAINING
    )
    grad_accum: int = option(1, "Micro-batches per optimizer step.", TRAINING)
    max_length: int | None = option(None, "Tokens of an example; the rest is cut. [512; built-in: its own]", TRAINING)
    lr: float | None = option(None, "Peak learning rate. [1e-4; built-in: its own]", TRAINING)
    schedule: str = option("cosine", "Learning rate after the warm-up: cosine, linear or constant.", TRAINING)
    warmup: float = option(0.03, "Warm-up: below 1 a share of the steps, from 1 on a number of steps.", TRAINING)
    weight_decay: float = option(0.0, "Decoupled weight decay, on all parameters.", TRAINING)
    beta1: float = option(0.9, "Decay rate of the first moment.", TRAINING)
    beta2: float = option(0.999, "Decay rate of the second moment.", TRAINING)
    eps: float = option(1e-8, "Added to the root of the second moment.", TRAINING)
    clip: float = option(1.0, "Largest norm of the gradient; 0 does not clip.", TRAINING)
    group_by_length: bool = option(True, "Batches of examples of like length: less padding.", SPEED)
    packing: bool = option(False, "Fill rows of --max-length tokens with several examples, kept apart.", SPEED)
    checkpointing: bool = option(False, "Recompute activations in the backward pass: less memory, slower.", SPEED)
    compile: bool = option(False, "Compile the layers of the model with torch.compile.", SPEED)
    seed: int = option(2024, "Seed of the data order and the dither.", RUN)
    log_every: int = option(10, "Steps between reports of the loss.", RUN)
    diagnostics: bool = option(False, "Measure the largest update and the share of stuck state at each report.", RUN)


@dataclass(frozen=True)
class Options(TrainConfig):
    """What both commands take."""

    model: str = option("builtin", "Hugging Face id, folder, .gguf file, or 'builtin': a small Llama.", MODEL)
    from_scratch: bool = option(False, "Random weights in the model's shape, by --seed: pretraining.", MODEL)
    data: str = option("builtin", "Records in Alpaca's format: .json, .jsonl, folder, Hub id, or 'builtin'.", MODEL)
    eval_data: str = option("builtin", "Multiple choice: TruthfulQA's mc_task.json, 'builtin', or 'none'.", MODEL)
    eval_limit: int | None = option(None, "Ask only the first N questions.", MODEL)
    held_out: int = option(500, "Records set aside for the held-out loss, at most a tenth of the data.", MODEL)
    tasks: str = option("", "Also evaluate on lm-evaluation-harness: names, .yaml files, folders; commas.", MODEL)
    train_on_all: bool = option(False, "Take the loss on the prompt too, not on the response only.", MODEL)
    liger: bool = option(False, "Liger kernels for norms, rotary positions and SwiGLU; needs a GPU.", SPEED)
    dtype: str = option("bfloat16", "Weights and activations: bfloat16 or float32.", SPEED)
    replicas: int = option(1, "Under torchrun, replicas of the model, each sharded over its processes.", SPEED)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...", SPEED)
    loggers: str = option("", "Where to log, separated by commas: tensorboard, wandb, trackio, jsonl.", RUN)
    log_peak_memory: bool = option(False, "Log the peak of memory too, in GiB.", RUN)


@dataclass(frozen=True)
class BenchOptions(Options):
    """What ``lowbit bench`` takes."""

    recipe: str = option("", "A run with a name: llama2-7b-alpaca or smollm2-alpaca; other options go before.", RUN)
    optimizers: str = option("torch,torch-fp32,8bit,4bit,8bit+nearest", "Names, separated by commas.", RUN)
    seeds: int = option(1, "Runs of each optimizer, with seeds --seed, --seed + 1, ...", RUN)
    parallel: int = option(1, "Runs at once, over all GPUs; several on one device are not timed.", RUN)
    fresh_caches: bool = option(False, "Let each run compile everything anew.", RUN)
    out: str = option("lowbit-bench", "Folder of the report.", RUN)
    overwrite: bool = option(False, "Replace a report that is already in --out.", RUN)
    save_every: int | None = option(None, "Steps between checkpoints of a run, for --resume; none without.", RUN)
    resume: bool = option(False, "Go on with what is not yet in the report of --out.", RUN)


@dataclass(frozen=True)
class EstimateOptions(Options):
    """What ``lowbit estimate`` takes."""

    optimizers: str = option("torch,torch-fp32,8bit,4bit", "Names, separated by commas.", RUN)
    gpus: int = option(1, "Number of GPUs, over which FSDP2 shards the model.", SPEED)
    bandwidth: float = option(4300.0, "A GPU's memory bandwidth in GB/s, read and written; an H200 copies 4300.", SPEED)


@dataclass(frozen=True)
class FinetuneOptions(Options):
    """What ``lowbit finetune`` takes."""

    optimizer: str = option("8bit", "Optimizer: 8bit, 4bit, 8bit+24bit, torch, ...", RUN)
    out: str = option("lowbit-finetune", "Folder of the checkpoints.", RUN)
    save_every: int | None = option(None, "Steps between checkpoints; the last step is always saved.", RUN)
    resume: bool = option(False, "Go on from the newest checkpoint in --out.", RUN)


def listed(text):
    """The names in a list separated by commas, in order and once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def resolve(options):
    """Options with every None of :class:`TrainConfig` decided, checked; raises :class:`UserError`."""
    defaults = {"batch_size": 16, "max_length": 512, "lr": 1e-4}
    length = {"epochs": 1.0}
    if options.model == "builtin":
        from lowbit.finetune import builtin

        defaults = {"batch_size": builtin.BATCH, "max_length": builtin.MAX_LENGTH, "lr": builtin.LR}
        length = {"steps": builtin.STEPS} if hasattr(builtin, "STEPS") else {"epochs": builtin.EPOCHS}
    if options.epochs is None and options.steps is None:
        defaults.update(length)
    options = replace(options, **{name: x for name, x in defaults.items() if getattr(options, name) is None})
    check(options)
    return options


def check(options):
    """Raise :class:`UserError` for the first option out of range, naming it."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    if options.epochs is not None and options.steps is not None:
        raise UserError("--epochs and --steps are both given: drop one")
    for names, good, rule in _RULES:
        for name in names:
            value = values.get(name)
            if value is not None and not good(value):
                raise UserError(f"--{name.replace('_', '-')} is {value}: give {rule}")


_RULES = (
    (("epochs", "lr", "bandwidth"), lambda x: 0 < x < float("inf"), "a number above 0"),
    (("steps", "batch_size", "grad_accum", "eval_limit"), lambda x: x >= 1, "at least 1"),
    (("save_every", "log_every", "replicas", "gpus", "seeds", "parallel"), lambda x: x >= 1, "at least 1"),
    (("max_length",), lambda x: x >= 8, "at least 8"),
    (("warmup", "weight_decay", "eps", "clip"), lambda x: 0 <= x < float("inf"), "a number from 0 on"),
    (("seed", "held_out"), lambda x: x >= 0, "a number from 0 on"),
    (("beta1", "beta2"), lambda x: 0 <= x < 1, "a number in [0, 1)"),
    (("loggers",), lambda x: set(listed(x)) <= set(LOGGERS), "some of " + ", ".join(LOGGERS) + ", separated by commas"),
    (("schedule",), SCHEDULES.__contains__, "one of " + ", ".join(SCHEDULES)),
    (("dtype",), DTYPES.__contains__, "one of " + ", ".join(DTYPES)),
)


def device_of(options):
    """The torch device that ``--device`` names; raises :class:`UserError` if there is none."""
    import torch

    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {options.device} can't be used ({reason}): give auto, cpu or cuda") from error
    return device
