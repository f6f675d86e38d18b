"""One parameter's state as other libraries save it, as this library's: fp32 moments under torch's names.

What a library keeps in blocks is dequantized by that library's own formula; the caller encodes it in the optimizer's
format, so training goes on within the coarser of the two roundings. torch.optim's state needs nothing of it.
"""

import torch

from lowbit.distributed import whole

BITSANDBYTES = "__bnb_optimizer_quant_state__"  # the wrapper that hides its state from FSDP; older versions have none
BLOCKS = (256, 2048)  # elements of a bitsandbytes block, by version
OPTIONS = {  # of param groups, which mean nothing here
    "alpha", "t_alpha", "t_beta3",  # bitsandbytes
    "master_bytewidth", "quantize",  # FlashOptim
}  # fmt: skip


def loaded(saved, group, p, name):
    """State ``saved`` under param group ``group`` by any known library, for parameter ``p``, with the whole's shapes.

    Raises ``ValueError`` where a library's state has no place here. What is of no known library is returned as it is.
    """
    if BITSANDBYTES in saved or "state1" in saved:
        return _bitsandbytes(saved, name)
    if any("::" in key for key in saved) or "error_bits" in saved:
        return _flashoptim(saved, group, p)
    return {key: _torchao(value) for key, value in saved.items()}


def _torchao(x):
    """torchao's state is tensors of its own classes, which know their value (OptimState8bit, 4bit, Fp8)."""
    known = isinstance(x, torch.Tensor) and hasattr(type(x), "__tensor_flatten__") and hasattr(x, "block_size")
    return x.dequantize(torch.float32) if known else x


def _bitsandbytes(saved, name):
    """``state1`` and ``state2``, in fp32 or as codes of a table ``qmap`` times the ``absmax`` of a block."""
    saved = {**saved, **saved.get(BITSANDBYTES, {})}
    if "state2" not in saved:
        raise ValueError(f"the bitsandbytes state of {name} has one moment: it is not that of an Adam")
    if "max1" in saved:
        raise ValueError(
            f"the bitsandbytes state of {name} has one scale for the whole tensor (block_wise=False); load it into "
            "bitsandbytes with block_wise=True first"
        )
    state = {"step": saved["step"]}
    for key, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
        codes, absmax = saved[f"state{number}"], saved.get(f"absmax{number}")
        if codes.dtype == torch.uint8:
            values = saved[f"qmap{number}"][codes.to(torch.int32)]
            codes = _times(values, absmax, _block(codes.numel(), absmax.numel(), name))
        state[key] = codes.to(torch.float32)
    return state


def _block(numel, blocks, name):
    """Elements of a block, of which there are ``blocks``."""
    for size in BLOCKS:
        if -(-numel // size) == blocks:
            return size
    raise ValueError(f"the bitsandbytes state of {name} has {blocks} scales for {numel} elements, in no known blocks")


def _times(values, scale, block):
    """Values times the scale of their block of consecutive elements, of which the last may be shorter."""
    scale = scale.flatten().to(torch.float32).repeat_interleave(block)[: values.numel()]
    return values * scale.view(values.shape)


def _flashoptim(saved, group, p):
    """int8 of a softsign for m, uint8 of the root for v, in blocks of 32 with an fp16 scale; the low bits of weights.

    The scales may be viewed as bf16 (https://arxiv.org/abs/2602.23349).
    """
    state = {key: saved[key] for key in ("step", "exp_avg", "exp_avg_sq") if key in saved}
    if "exp_avg::quantized" in saved:
        y = whole(saved["exp_avg::quantized"]).to(torch.float32) / 127.0
        state["exp_avg"] = _times(y / (2.0 - y.abs()), whole(saved["exp_avg::scales"]).view(torch.float16), 32)
    if "exp_avg_sq::quantized" in saved:
        y = whole(saved["exp_avg_sq::quantized"]).to(torch.float32) / 255.0
        state["exp_avg_sq"] = _times(y, whole(saved["exp_avg_sq::scales"]).view(torch.float16), 32).square()
    if "error_bits" in saved and p.dtype == torch.bfloat16:
        width = int(group["master_bytewidth"]) - p.element_size()
        state["weight_low"] = _low_bits(whole(p), whole(saved["error_bits"]), width)
    return state


def _low_bits(p, errors, width):
    """FlashOptim's error of a bf16 weight, in one byte or two, as the lower half of fp32 (``weights="32bit"``).

    It counts 127ths or 32767ths of half the weight's last bit.
    """
    errors, parts = (errors, 127) if width == 1 else (errors.view(torch.int16), 32767)
    b = p.to(torch.float32).view(torch.int32)
    half = torch.ldexp(torch.ones_like(b, dtype=torch.float32), ((b >> 23) & 255).clamp_(min=1) - (127 + 8))
    w = p.to(torch.float32) + errors.to(torch.float32) / parts * half
    return (w.view(torch.int32) - b).clamp_(-0x8000, 0x7FFF).to(torch.int16)
