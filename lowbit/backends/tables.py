"""The tables through which the kernel finds its tensors, and the launches of a step.

A :class:`Table` serves the parameters of one device. It is built when a step first sees them, and again only when an
address, an option or the set of parameters with a gradient changes; a steady step is a comparison of addresses and the
launches.
"""

import contextlib
import itertools
import operator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from lowbit import rules
from lowbit.backends import triton as kernels
from lowbit.distributed import is_dtensor, local, part
from lowbit.dither import parameter_offset, signed32
from lowbit.ops import APPROXIMATE, BLOCK, INTERPRETED, tl
from lowbit.plan import here

BLOCKS = 32  # blocks of 32 elements of a tile: eight elements a thread with four warps
TILES = 2  # that a program of whole chunks steps, one after the other
AHEAD = 528  # tiles from a program's own to those that it has the cache fetch
SPLIT = 16  # programs that share an entry of the table of chunks
TILE = BLOCKS * BLOCK
WORTH_A_LAUNCH = 1 / 500  # of all elements: whole chunks of a combination that has fewer go with the rest

_address = torch.Tensor.data_ptr
_grad, _exp_avg = operator.attrgetter("grad"), operator.itemgetter("exp_avg")
_NAMES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "weight_low")


def _local_address(x):
    return local(x).data_ptr()


def _triton_dtype(dtype):
    return None if dtype is None else getattr(tl, str(dtype).removeprefix("torch."))


@dataclass
class Launch:
    """One launch of a kernel: its number of programs and its compile-time parameters, in the order of its signature.

    The first call compiles; later ones hand the arguments to what was compiled, which takes a tenth of the time that
    Triton takes to look it up.
    """

    kernel: object
    programs: int
    constants: dict
    options: dict
    run: object = None  # what was compiled, for this number of programs; stays None in the interpreter

    def compile(self, guard, device, *arguments):
        """Compile for the arguments of a call, without calling."""
        with guard(device):  # of this thread
            self.kernel.warmup(*arguments, grid=(self.programs, 1, 1), **self.constants, **self.options)

    def __call__(self, *arguments):
        if self.run is None:
            compiled = self.kernel[(self.programs, 1, 1)](*arguments, **self.constants, **self.options)
            self.run = compiled and compiled[(self.programs, 1, 1)]
        else:
            self.run(*map(_address, arguments), *self.constants.values())


class Table:
    """Parameters of one device and their step.

    ``work`` lists (number of the parameter, number of its group, group, parameter, layout, state) for every parameter
    of the device that has a gradient; ``others`` are the parameters without one.
    """

    def __init__(self, device, rule, decoupled, work, others, groups):
        self.device, self.rule, self.decoupled = device, rule, decoupled
        self.params = [w[3] for w in work] + others
        self.address = _local_address if any(map(is_dtensor, self.params)) else _address
        self.states = [w[5] for w in work]
        self.options, self.members = options(groups), members(groups)
        self.copies = []  # (tensor, its contiguous copy, whether it is written back)
        for *_, state in work:
            state["step"] = state["step"].to(device)  # counted on the device: a step has nothing to ask the host
        self._keep = [list(state.values()) for state in self.states]
        rows = [self._addresses(p, state) for *_, p, _, state in work]
        on_device = {"device": device}
        self.addresses = torch.tensor(rows, dtype=torch.int64).to(**on_device)
        self.steps = torch.tensor([state["step"].data_ptr() for state in self.states]).to(**on_device)
        self.groups = torch.tensor([w[1] for w in work], dtype=torch.int32).to(**on_device)
        numbers = [signed32(parameter_offset(group["seed"], i) + part(p).start) for i, _, group, p, *_ in work]
        self.shapes = torch.tensor([_shape(w[4]) for w in work], dtype=torch.int64).to(**on_device)
        self.count = torch.tensor([len(work)], dtype=torch.int32).to(**on_device)
        scalars = torch.zeros(len(work), kernels.SCALARS.value, dtype=torch.float32)
        scalars[:, kernels.RULE_SCALARS.value + 1] = torch.tensor(numbers, dtype=torch.int32).view(torch.float32)
        self.scalars = scalars.to(**on_device)
        self.pairs = self.scalars.view(torch.int64)
        self.hyper = torch.empty(len(groups), kernels.HYPER.value, dtype=torch.float64, **on_device)
        self.zero, self.one = (torch.tensor([x], dtype=torch.float32).to(**on_device) for x in (0.0, 1.0))
        programs = -(-len(work) // kernels.TENSORS.value)
        self.prepare = Launch(kernels.scalars_kernel, programs, {"RULE": rules.scalars, "DECOUPLED": decoupled}, {})
        self.launches = list(_launches(rule, work, rows, device))
        # kernels run on the current device, which need not be this one
        self.guard = getattr(torch.get_device_module(device), "device", contextlib.nullcontext)
        self.settings = self.hyper_rows = None  # those that are on the device
        self.stepped = self.params[: len(work)]
        self.grad_dtypes = [p.grad.dtype for p in self.stepped]
        self.grads = list(map(self.address, map(_grad, self.stepped)))
        self.places = list(map(self.address, self.params))
        self.moments = list(map(_exp_avg, self.states))

    def _addresses(self, p, state):
        p, g = self._contiguous(here(p), True), self._contiguous(here(p.grad), False)
        return [_local_address(x) if x is not None else 0 for x in (p, g, *map(state.get, _NAMES))]

    def _contiguous(self, x, written):
        if x.is_contiguous():
            return x
        copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.copies.append((x.detach(), copy, written))
        return copy

    def serves(self, groups, settings):
        """Whether the tables hold for the optimizer as it is now.

        ``settings`` is another object whenever an option of a group is another.
        """
        try:
            grads = list(map(self.address, map(_grad, self.stepped)))
            if any(p.grad is not None for p in self.params[len(self.stepped) :]):
                return False
            if settings is not self.settings and options(groups) != self.options:
                return False
            if members(groups) != self.members:
                return False
            if list(map(self.address, self.params)) != self.places:
                return False
            if list(map(_exp_avg, self.states)) != self.moments:
                return False
            return grads == self.grads or self._follow(grads)
        except (TypeError, RuntimeError, KeyError):  # no gradient, a sparse one, a state that was taken away
            return False

    def _follow(self, grads):
        """Take new addresses of gradients into the tables, which is all that most steps need; False if it is not."""
        if self.copies:
            return False
        for p, dtype, old, new in zip(self.stepped, self.grad_dtypes, self.grads, grads, strict=True):
            if (new - old) % 16 or p.grad.dtype != dtype or not local(p.grad).is_contiguous():
                return False
        self.addresses[:, 1].copy_(torch.tensor(grads, dtype=torch.int64), non_blocking=True)
        self.grads = grads
        return True

    def step(self, groups, settings, grad_scale=None, found_inf=None):
        """Launch one step; nothing waits for the device."""
        if settings is not self.settings:
            self._update_hyper(groups)
            self.settings = settings
        grad_scale = self.one if grad_scale is None else grad_scale
        found_inf = self.zero if found_inf is None else found_inf
        for x, copy, _ in self.copies:
            copy.copy_(x)
        calls = [(self.prepare, self.steps, self.groups, self.hyper, grad_scale, found_inf, self.scalars, self.count)]
        calls += [(launch, chunks, self.addresses, self.shapes, self.pairs) for chunks, launch in self.launches]
        if self.prepare.run is None and not INTERPRETED.value:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda call: call[0].compile(self.guard, self.device, *call[1:]), calls))
        with self.guard(self.device):
            for launch, *arguments in calls:
                launch(*arguments)
        for x, copy, written in self.copies:
            if written:
                x.copy_(copy)

    def _update_hyper(self, groups):
        """Bring what schedules move to the device, if it moved; a learning rate that lives there is copied there."""
        rows = [hyper(group, self.device) for group in groups]
        if rows != self.hyper_rows:
            self.hyper.copy_(torch.tensor(rows, dtype=torch.float64), non_blocking=True)
            self.hyper_rows = rows
        for i, group in enumerate(groups):
            if _on_device(group["lr"], self.device):
                self.hyper[i, 0].copy_(group["lr"].reshape(()), non_blocking=True)


def _on_device(lr, device):
    return isinstance(lr, torch.Tensor) and lr.device.type == device.type != "cpu"


def hyper(group, device):
    """The row of a group in the table of hyperparameters."""
    lr = 0.0 if _on_device(group["lr"], device) else float(group["lr"])
    beta1, beta2 = group["betas"]
    sign = -1.0 if group["maximize"] else 1.0
    return lr, float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]), sign


def options(groups):
    """What of the groups decides the layout of states."""
    return [[group[name] for name in ("state", "weights", "min_numel", "seed")] for group in groups]


def members(groups):
    """The parameters of each group. Lists compare equal by their members' identity, before these are asked."""
    return [list(group["params"]) for group in groups]


def _shape(layout):
    """Width of a row, blocks of a row, all blocks, stride: see :func:`lowbit.backends.triton.step_kernel`."""
    rows, width = layout.grid
    per_row = -(-width // BLOCK)
    return width, max(per_row, 1), rows * per_row, layout.stride or width


def _launches(rule, work, rows, device):
    """The launches of a step: for each combination of formats and dtypes one of whole chunks, one of the rest."""
    spans = {}  # of a combination: (number of the parameter, whole chunks, tiles)
    for i, (*_, p, layout, _) in enumerate(work):
        key = (layout.format, layout.weights, here(p).dtype, p.grad.dtype if not p.is_complex() else torch.float32)
        consecutive = layout.grid[0] == 1 and all(address % 16 == 0 for address in rows[i])
        count = layout.numel // (_tiles(layout.weights) * TILE) if consecutive else 0
        spans.setdefault(key, []).append((i, count, -(-_shape(layout)[2] // BLOCKS)))
    least = WORTH_A_LAUNCH * sum(layout.numel for *_, layout, _ in work) / TILE
    whole, rest = {}, {}
    for key, found in spans.items():
        tiles = _tiles(key[1])
        apart = sum(count for _, count, _ in found) * tiles >= least
        whole[key] = [(i, 0, count) for i, count, _ in found if apart and count]
        rest[key] = [(i, count * tiles * apart, end) for i, count, end in found if count * tiles * apart < end]
    for chunks, is_whole in ((whole, True), (rest, False)):
        for key, found in chunks.items():
            if found:
                table = torch.cat(list(itertools.chain.from_iterable(_entries(*span) for span in found))).to(device)
                constants, how = _constants(rule, *key, is_whole), _options(*key[:3], is_whole)
                yield table, Launch(kernels.step_kernel, len(table) * SPLIT, constants, how)


def _tiles(weights):
    """Tiles of a whole chunk: with low bits there are registers for one only."""
    return 1 if weights.low else TILES


def _options(format, weights, p_dtype, whole):
    """Warps, and on NVIDIA registers a thread of whole chunks of 16-bit weights.

    Left to itself ptxas takes more of them, and fewer programs share a processor. These are what an H200 likes best.
    """
    limited = APPROXIMATE.value and whole and p_dtype.itemsize == 2 and format.m.bits < 32
    registers = {None: 72, torch.int8: 56, torch.int16: 64}[weights.low]
    return {"num_warps": 4} | ({"maxnreg": registers} if limited else {})


def _entries(tensor, start, end):
    """Rows of the table of chunks for chunks ``start`` … ``end`` of a tensor."""
    first = torch.arange(start, end, SPLIT, dtype=torch.int64)
    yield torch.stack(((first << 32) + tensor, (end << 32) + (end - first).clamp(max=SPLIT)), dim=1)


def _constants(rule, format, weights, p_dtype, g_dtype, whole):
    m, v, tiles = format.m, format.v, _tiles(weights) if whole else 1
    return {
        "RULE": rule, "M_DECODE": m.decode, "M_ENCODE": m.encode, "V_DECODE": v.decode, "V_ENCODE": v.encode,
        "W_DECODE": weights.decode, "W_ENCODE": weights.encode,
        "P": _triton_dtype(p_dtype), "G": _triton_dtype(g_dtype),
        "M": _triton_dtype(m.codes), "M_SCALE": _triton_dtype(m.scale), "V": _triton_dtype(v.codes),
        "V_SCALE": _triton_dtype(v.scale), "LOW": _triton_dtype(weights.low), "M_UNIT": m.unit, "V_UNIT": v.unit,
        "BLOCKS": BLOCKS, "TILES": tiles, "SPLIT": SPLIT, "WHOLE": whole,
        "AHEAD": AHEAD // tiles if whole and APPROXIMATE.value else 0,
    }  # fmt: skip
