"""The one ``torch.optim.Optimizer`` subclass: groups, options, the step, state dicts."""

import logging

import torch

from lowbit import checkpoint, rules
from lowbit.backends import BACKENDS, Backend, Scalars
from lowbit.backends.tables import Table
from lowbit.distributed import align_gradient, is_dtensor, local, local_state, part, place
from lowbit.dither import parameter_offset
from lowbit.options import check_group, check_parameters, parameter_name, settings
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
    _step_supports_amp_scaling = True  # torch.amp.GradScaler: unscaling and skipping are part of the step

    def __init__(self, params, *, backend="auto", **defaults):
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
        check_group(defaults, "the defaults")
        self._setup(backend)
        super().__init__(params, {**defaults, "format_version": checkpoint.VERSION})

    def _setup(self, backend):
        self._backend = Backend(backend)
        self._layouts = {}  # parameter -> the layout its state is in
        self._tables = {}  # device -> the table through which a kernel steps all its parameters
        self._tabled = False  # whether every parameter is on such a device
        self._sharded = []  # parameters that are DTensors
        self._settings = None  # options of the groups as checked last

    def __getstate__(self):
        return {**super().__getstate__(), "backend": self._backend.name}

    def __setstate__(self, state):
        state = dict(state)
        self._setup(state.pop("backend", "auto"))
        super().__setstate__(state)
        self._sharded = [p for *_, p in self._numbered() if is_dtensor(p)]

    def add_param_group(self, param_group):
        """Add parameters with options of their own; see :class:`torch.optim.Optimizer`. The dict is not changed."""
        super().add_param_group(dict(param_group) if isinstance(param_group, dict) else param_group)
        try:
            group = self.param_groups[-1]
            check_group(group, f"param group {len(self.param_groups) - 1}")
            check_parameters(group, len(self.param_groups) - 1)
            self._sharded += [p for p in group["params"] if is_dtensor(p)]
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
                tensors = local_state(state)
                known = found_layout(known or planned, tensors)
                if known is None:
                    raise ValueError(f"the state holds tensors of no known format: {sorted(state)}")
                state = place(p, planned, convert(known, planned, tensors)) if known != planned else state
            self.state[p] = state or place(p, planned, allocate(planned, p.device))
            self._layouts[p] = planned
        return self.state[p]

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters that have a gradient. ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        for p in self._sharded:
            align_gradient(p)
        if not self.state and self._only_asked():
            self.init_states()
            return loss
        stale = [
            device for device, table in self._tables.items() if not table.serves(self.param_groups, self._settings)
        ]
        if stale or not self._tabled:
            self._scan(stale)
        for device, table in self._tables.items():
            scaler = (x if x is None else x.to(device) for x in self._scaler())
            table.step(self.param_groups, self._settings, *scaler)
        return loss

    def _check(self):
        """Check the options of the groups, if one is another than at the last step; a tensor may always be."""
        found = list(map(settings, self.param_groups))
        if any(isinstance(values[0], torch.Tensor) for values in found) or found != self._settings:
            for number, group in enumerate(self.param_groups):
                check_group(group, f"param group {number}")
            self._settings = found

    def _only_asked(self):
        """Whether this first step is that of torch's ``get_optimizer_state_dict``, which wants state to exist.

        It steps a fresh optimizer with learning rates and gradients of zero, and would leave ``step`` at 1.
        """
        on_cpu = all(not isinstance(g["lr"], torch.Tensor) or g["lr"].device.type == "cpu" for g in self.param_groups)
        if not on_cpu or any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        gradients = [local(p.grad) for *_, p in self._numbered() if p.grad is not None]
        return all(g.layout == torch.strided and not g.any() for g in gradients)

    def _scaler(self):
        """``grad_scale`` and ``found_inf``, which a GradScaler leaves here for the step; None without one."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    def _scan(self, stale):
        """Step the parameters that are served one by one, and make the tables of the devices that have kernels."""
        for device in stale:
            del self._tables[device]
        devices = {}
        for item in self._numbered():
            devices.setdefault(item[-1].device, []).append(item)
        self._tabled = True
        for device, items in devices.items():
            kind = self._backend.choose(device, sum(local(p).numel() for *_, p in items))
            if kind != "triton":
                self._tabled = False
                self._step_each(kind, items)
            elif device not in self._tables:
                self._tables[device] = self._table(device, items)

    def _table(self, device, items):
        work = [(*item, self._layouts_of(item), self.state[item[-1]]) for item in self._with_gradient(items)]
        others = [p for *_, p in items if p.grad is None]
        return Table(device, type(self).rule, self.decoupled, work, others, self.param_groups)

    def _layouts_of(self, item):
        _, _, group, p = item
        self._state(p, group)
        return self._layouts[p]

    def _step_each(self, kind, items):
        """The step of the eager and compiled backends, one parameter after another."""
        grad_scale, found_inf = self._scaler()
        if found_inf is not None and found_inf.item():
            return
        scalars = {}
        for number, group_number, group, p in self._with_gradient(items):
            state = self._state(p, group)
            state["step"] += 1
            key = (group_number, int(state["step"].item()))
            if key not in scalars:
                scalars[key] = Scalars(group, key[1], self.decoupled, grad_scale)
            offset = parameter_offset(group["seed"], number) + part(p).start
            self._backend.step(kind, type(self).rule, self._layouts[p], p, p.grad, state, offset, scalars[key])

    def _numbered(self):
        """(number of the parameter, number of its group, group, parameter) of all parameters."""
        number = 0
        for group_number, group in enumerate(self.param_groups):
            for p in group["params"]:
                yield number, group_number, group, p
                number += 1

    def _with_gradient(self, items):
        """Those of :meth:`_numbered` that have a gradient."""
        for item in items:
            _, group_number, group, p = item
            if p.grad is not None:
                if p.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of {parameter_name(group, group_number, p)} is sparse, which lowbit does not "
                        "support: make it dense (nn.Embedding(sparse=False)) or give it to torch.optim.SparseAdam"
                    )
                yield item

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
        self._tables.clear()
        self._tabled = False
        for p, (layout, state) in states.items():
            self.state[p], self._layouts[p] = place(p, layout, state), layout
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)
