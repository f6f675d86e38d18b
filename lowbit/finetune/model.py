"""The model to fine-tune and its tokenizer."""

import importlib.util
from contextlib import contextmanager
from pathlib import Path

import torch

from lowbit.finetune.errors import UserError
from lowbit.finetune.sources import HUB_ID, first_line


def load_model(name, *, dtype=torch.bfloat16, device="cpu", seed=2024, from_scratch=False):
    """A causal language model, in evaluation mode and without generation cache, and its tokenizer.

    Args:
        name: ``builtin``, an id on the Hugging Face Hub, a local folder, or the path of a .gguf file.
        dtype: of the weights.
        seed: of the weights, where they are random (``builtin``, and with ``from_scratch``).
        from_scratch: random weights in the model's shape, made on the device; its own are not read.

    Returns:
        ``(model, tokenizer)``; the tokenizer has a padding token.

    Raises:
        UserError: nothing there, not readable, not a causal language model, a missing package, no Hub.
    """
    if name == "builtin":
        from lowbit.finetune.builtin import build

        model, tokenizer = build(seed)
    elif from_scratch:
        place = torch.device(device)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
            torch.manual_seed(seed)
            model, tokenizer = skeleton(name, dtype)
    else:
        model, tokenizer = _pretrained(name, dtype)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no end-of-text token: set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.use_cache = False
    cast(model, dtype)
    return model.to(device).eval(), tokenizer


def skeleton(name, dtype=torch.float32):
    """A model as :func:`load_model` gives it and its tokenizer, by the configuration alone: no weights are read."""
    if name == "builtin":
        from lowbit.finetune.builtin import skeleton

        return skeleton()
    source, options = _place(name)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source, **options)
        _check_causal(name, config)
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config, **{_dtype_name(): dtype})
        return model, AutoTokenizer.from_pretrained(source, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} can't be loaded: {type(error).__name__}: {first_line(error)}") from error


def cast(model, dtype):
    """Bring the weights to a dtype, in place.

    Not the buffers: rotary frequencies in bf16 would put positions in the wrong place.
    """
    for p in model.parameters():
        p.data = p.data.to(dtype)


def _pretrained(name, dtype):
    """Model and tokenizer by transformers, each of its many errors as a :class:`UserError`."""
    source, options = _place(name)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source, **options)
        _check_causal(name, config)
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(source, config=config, **options, **{_dtype_name(): dtype})
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, its Hub client and its file formats share no base class
        hint = "" if Path(source).exists() else " (not a local folder, so looked up on the Hugging Face Hub)"
        raise UserError(f"{name} can't be loaded{hint}: {type(error).__name__}: {first_line(error)}") from error
    if "gguf_file" in options and getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)  # it is dequantized, and can be saved
    return model, tokenizer


def _place(name):
    """Where transformers finds a model: ``(folder or Hub id, options)``."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"{name} has no config.json: give the folder of a transformers model")
        return str(path), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{name}: there is no such file")
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise UserError(f"{name}: GGUF files need the package {package}: pip install {package}")
        return str(path.parent), {"gguf_file": path.name}
    if path.exists():
        raise UserError(f"{name} is not a model: give a .gguf file, a folder, or a Hugging Face id")
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{name}: there is no such file or folder")
    return name, {}


def _check_causal(name, config):
    """Raise :class:`UserError` unless the weights of ``config`` are those of a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    head = CAUSAL.get(config.model_type)
    saved = config.architectures or [head]
    if head is None or head not in saved:
        kind = ", ".join(filter(None, saved)) or config.model_type
        raise UserError(f"{name} is not a causal language model ({kind}): give one such as Llama, Qwen or GPT-2")


def _dtype_name():
    """The name of from_pretrained's option; renamed in transformers 4.56."""
    import transformers
    from packaging.version import Version

    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


@contextmanager
def _quiet():
    """Without the bars that transformers draws while it loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def logits_at(model, rows, columns, **inputs):
    """Logits of some positions only, [positions, vocabulary]: ``model(**inputs).logits[rows, columns]``.

    The output layer sees those positions alone, which saves the time and the memory of the rest.
    """
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: (args[0][rows, columns], *args[1:]))
    try:
        return model(**inputs).logits
    finally:
        hook.remove()
