"""The eager backend's updater under ``torch.compile``: one graph for all shapes, one pass over memory."""

import functools
import logging
import shutil
import types

import torch

from lowbit.backends.eager import updater as eager_updater

CPU_PIECE = 1 << 18  # elements; the new moments wait in fp32 for their block's maximum, in cache if the piece is small
DEVICE_PIECE = 1 << 30  # whole parameters in practice
WORTH_COMPILING = 1 << 24  # parameters from which a CPU run of a thousand steps repays some 20 s of compilation

logger = logging.getLogger("lowbit")


@functools.cache
def updater(rule, format, weights, dtypes):
    """As :func:`lowbit.backends.eager.updater`, but scalars are one tensor: a new value compiles nothing."""
    update = eager_updater(rule, format, weights)

    def step(p, low, g, m_codes, m_scale, v_codes, v_scale, first, lanes, dither, scalars):
        update(p, low, g, m_codes, m_scale, v_codes, v_scale, first, lanes, dither, scalars.unbind(0))

    # torch.compile counts recompilations by code object, so each combination of formats gets one of its own
    name = f"lowbit_{rule.__name__}_{format.name}_{weights.name}_{'_'.join(str(d)[6:] for d in dtypes)}"
    code = step.__code__.replace(co_name=name)
    step = types.FunctionType(code, step.__globals__, name, step.__defaults__, step.__closure__)
    step = torch.compile(step, fullgraph=True)

    def call(*arguments):
        *tiles, lanes, dither, scalars = arguments
        step(*[x if x is None else _any_length(x) for x in tiles], lanes, dither, scalars)

    return call


def _any_length(tile):
    """A tile whose number of blocks is dynamic, and nothing else.

    ``data`` drops what a guard would look at besides: whether it is a view, of what, and whether it wants a gradient.
    """
    tile = tile.data
    torch._dynamo.mark_dynamic(tile, 0)
    return tile


@functools.cache
def available(device_type):
    """Whether ``torch.compile`` can build for a device: a C++ compiler for the CPU, Triton for a GPU."""
    if device_type == "cpu":
        return any(shutil.which(name) for name in ("g++", "c++", "clang++"))
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return device_type in ("cuda", "xpu")
