"""What the loss hides of an optimizer: updates that explode, and moments that no longer move.

State is read as it is kept, by whatever library, and decoded to fp32 one parameter at a time.
"""

import torch

from lowbit import loaders
from lowbit.distributed import local, local_state
from lowbit.finetune import processes
from lowbit.optimizer import Optimizer
from lowbit.state import decode_parameter

SAMPLE = 1 << 16  # elements of a parameter whose exact running mean is kept
FACTOR = 2.0  # an exp_avg_sq that is further than this from the exact mean is stuck


class Diagnostics:
    """Follows an optimizer: call :meth:`observe` right before each step and :meth:`measure` after it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.exact = {}  # parameter -> exp_avg_sq of its first elements as fp32 would keep it

    @torch.no_grad()
    def observe(self):
        """Add the gradients, as the optimizer will see them, to the exact running means."""
        for group, p in self._parameters():
            if p.grad is not None:
                beta2 = group["betas"][1]
                g = _sample(local(p.grad)).to(torch.float32)
                if p not in self.exact:
                    found = moments(self.optimizer, group, p)
                    # none before the first step; what is there if the run began without diagnostics
                    self.exact[p] = _sample(found[2]).clone() if found else torch.zeros_like(g)
                self.exact[p].mul_(beta2).addcmul_(g, g, value=1 - beta2)

    @torch.no_grad()
    def measure(self):
        """``{"update", "stuck"}`` of the latest step; empty if the optimizer has no moments that can be read.

        ``update`` is the largest |m̂ / (√v̂ + eps)| of all elements. ``stuck`` is the share of a sample of elements whose
        exp_avg_sq is more than :data:`FACTOR` away from its exact value. All processes have to call it.
        """
        updates, stuck, sampled = [], [], 0
        for group, p in self._parameters():
            if not self.optimizer.state.get(p):
                continue
            found = moments(self.optimizer, group, p)
            if found is None:
                return {}
            if found[1].numel():
                updates.append(largest_update(*found, group["betas"], group["eps"]))
            if p in self.exact:
                exact, v = self.exact[p], _sample(found[2])
                stuck.append(((v > FACTOR * exact) | (FACTOR * v < exact)).sum())
                sampled += exact.numel()
        here = (torch.stack(updates).max().item() if updates else 0.0, int(sum(stuck)), sampled)
        updates, stuck, sampled = zip(*processes.gather(here))
        return {"update": max(updates), "stuck": sum(stuck) / sum(sampled)} if any(sampled) else {}

    def _parameters(self):
        return [(group, p) for group in self.optimizer.param_groups for p in group["params"] if "betas" in group]

    def state_dict(self):
        """The exact means in the order of the parameters, None for a parameter without; None if they are of shards."""
        if processes.count() > 1:
            return None
        return [self.exact.get(p) for _, p in self._parameters()]

    def load_state_dict(self, state):
        """Go on from a :meth:`state_dict`; from None, or in several processes, with the optimizer's own state."""
        if state is not None and processes.count() == 1:
            pairs = zip(self._parameters(), state, strict=True)
            self.exact = {p: x.to(p.device) for (_, p), x in pairs if x is not None}


def _sample(x):
    """The first elements of a tensor."""
    return x.reshape(-1)[:SAMPLE]


def largest_update(step, m, v, betas, eps):
    """The largest |m̂ / (√v̂ + eps)|, a scalar on the device; 0/0 is no update."""
    m = m.abs() / (1 - betas[0] ** step)
    update = m / ((v / (1 - betas[1] ** step)).sqrt_() + eps)
    return update.masked_fill_(m == 0, 0.0).max()


def moments(optimizer, group, p):
    """``(step, exp_avg, exp_avg_sq)`` of a parameter in fp32, of this process's part; None if they can't be read."""
    state = optimizer.state.get(p)
    if not state or p.is_complex():
        return None
    if isinstance(optimizer, Optimizer):
        m, v = (local(x) for x in decode_parameter(optimizer, p))
        return int(state["step"]), m, v
    try:
        found = loaders.loaded(_as_saved(local_state(state)), group, p, "a parameter")
        step, m, v = (found[name] for name in ("step", "exp_avg", "exp_avg_sq"))
    except (ValueError, KeyError):
        return None
    return int(step), m.to(torch.float32), v.to(torch.float32)


def _as_saved(state):
    """A parameter's live state as its library saves it: FlashOptim's codes and scales are in objects of its own.

    The low bits of its weights are left out, which are no moments.
    """
    saved = {}
    for name, value in state.items():
        if name == "error_bits":
            continue
        if hasattr(value, "is_quantized") and not isinstance(value, torch.Tensor):
            saved |= value.state_dict(name, allow_quantized=True)
        else:
            saved[name] = value
    return saved
