"""The one ``torch.optim.Optimizer`` subclass: groups, options, the step, state dicts."""

import logging

import torch

from lowbit import checkpoint, rules
from lowbit.backends import BACKENDS, Backend, Scalars
from lowbit.dither import parameter_offset
from lowbit.options import check_group, check_parameters, parameter_name
from lowbit.plan import plan
from lowbit.state import allocate, convert, found_layout
from lowbit.summary import Summary

logger = logging.getLogger("lowbit")


class Optimizer(torch.optim.Optimizer):
    """Adam-like optimizer with low-bit state: subclasses name the rule and the signature.

    State is plain tensors in ``state[p]`` (:mod:`lowbit.state`); options are plain values in ``param_groups``.
    """

    rule = rules.adamw
    decoupled = True  # weight decay outside the gradient

    def __init__(self, params, *, backend="auto", **defaults):
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
        check_group(defaults, "the defaults")
        self._setup(backend)
        super().__init__(params, {**defaults, "format_version": checkpoint.VERSION})

    def _setup(self, backend):
        self._backend = Backend(backend)
        self._layouts = {}  # parameter -> the layout its state is in

    def __getstate__(self):
        return {**super().__getstate__(), "backend": self._backend.name}

    def __setstate__(self, state):
        state = dict(state)
        self._setup(state.pop("backend", "auto"))
        super().__setstate__(state)

    def add_param_group(self, param_group):
        """Add parameters with options of their own; see :class:`torch.optim.Optimizer`. The dict is not changed."""
        super().add_param_group(dict(param_group) if isinstance(param_group, dict) else param_group)
        try:
            group = self.param_groups[-1]
            check_group(group, f"param group {len(self.param_groups) - 1}")
            check_parameters(group, len(self.param_groups) - 1)
        except (ValueError, TypeError):
            self.param_groups.pop()
            raise

    def init_states(self):
        """Allocate all state now, so that too little memory shows before training starts."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._state(p, group)

    def summary(self):
        """What is kept in which format, and its bytes: print it, or read ``.rows``, ``.bytes``, ``.bytes_per_param``.

        Allocates nothing, so it works on the meta device too.
        """
        return Summary.of(self)

    def _state(self, p, group):
        """State of a parameter in its planned layout: allocated, or converted if its group's options have changed."""
        planned = plan(p, group)
        known = self._layouts.get(p)
        if known is not planned or p not in self.state:
            state = self.state.get(p)
            if state:
                known = found_layout(known or planned, state)
                if known is None:
                    raise ValueError(f"the state holds tensors of no known format: {sorted(state)}")
                state = convert(known, planned, state) if known != planned else state
            self.state[p] = state or allocate(planned, p.device)
            self._layouts[p] = planned
        return self.state[p]

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters that have a gradient. ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = list(self._with_gradient())
        sizes = self._elements_by_device(work)
        scalars = {}
        for number, group_number, group, p in work:
            state = self._state(p, group)
            state["step"] += 1
            step = int(state["step"].item())
            key = (group_number, step)
            if key not in scalars:
                scalars[key] = self._scalars(group, step)
            kind = self._backend.choose(p.device, sizes[p.device])
            offset = parameter_offset(group["seed"], number)
            self._backend.step(kind, type(self).rule, self._layouts[p], p, p.grad, state, offset, scalars[key])
        return loss

    def _with_gradient(self):
        """(number of the parameter, number of its group, group, parameter), for those with a gradient."""
        number = 0
        for group_number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    if p.grad.layout != torch.strided:
                        raise RuntimeError(
                            f"the gradient of {parameter_name(group, group_number, p)} is sparse, which lowbit does not support: "
                            "make it dense (nn.Embedding(sparse=False)) or give it to torch.optim.SparseAdam"
                        )
                    yield number, group_number, group, p
                number += 1

    def _elements_by_device(self, work):
        sizes = {}
        for *_, p in work:
            sizes[p.device] = sizes.get(p.device, 0) + p.numel()
        return sizes

    def _scalars(self, group, step):
        values = rules.scalars(
            self.decoupled, step, group["lr"], group["betas"], group["eps"], group["weight_decay"]
        )  # fmt: skip
        return Scalars(step, -1.0 if group["maximize"] else 1.0, values)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict):
        """Load a state dict of this library or of ``torch.optim.AdamW``/``Adam``.

        State in another format than this optimizer's is converted to this optimizer's. The options of the param groups
        come from the state dict, but ``state``, ``weights`` and ``min_numel`` stay as constructed. A state dict that
        does not fit raises ``ValueError`` and changes nothing.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, states = checkpoint.read(self, state_dict)
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update(new)
        self.state.clear()
        self._layouts.clear()
        for p, (layout, state) in states.items():
            self.state[p], self._layouts[p] = state, layout
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)
