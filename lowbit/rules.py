"""The mathematics of each optimizer on fp32 values: pure functions, one of them a rule.

A rule takes the weight, the gradient, the two moments and the scalars of the step, and returns the new weight and
moments. The scalars of a step come from :func:`scalars`.
"""

from lowbit.ops import constexpr, divide, exp, jit, log, sqrt, tl  # noqa: F401  the interpreter looks for tl here


@jit
def adamw(w, g, m, v, beta1, rest1, beta2, rest2, step_size, bias2, eps, decay):
    """AdamW, decoupled weight decay (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    ``rest`` is 1 - beta, ``step_size`` is lr / (1 - beta1^t), ``bias2`` is 1 / sqrt(1 - beta2^t), ``decay`` is
    lr * weight_decay. The decay joins the update before it meets the weight: w * (1 - decay) would round twice.
    """
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    update = divide(m, sqrt(v) * bias2 + eps) * step_size + w * decay
    return w - update, m, v


@jit
def adam(w, g, m, v, beta1, rest1, beta2, rest2, step_size, bias2, eps, decay):
    """Adam (Kingma and Ba, https://arxiv.org/abs/1412.6980): weight decay is an L2 term of the gradient."""
    return adamw(w, g + w * decay, m, v, beta1, rest1, beta2, rest2, step_size, bias2, eps, 0.0)


@jit
def scalars(step, lr, beta1, beta2, eps, weight_decay, DECOUPLED: constexpr):
    """The eight scalars of a rule, float64, for step number ``step``, counted from 1; ``DECOUPLED`` as in AdamW."""
    step_size = lr / (1.0 - exp(step * log(beta1)))
    bias2 = exp(-0.5 * log(1.0 - exp(step * log(beta2))))
    decay = lr * weight_decay if DECOUPLED else weight_decay
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, step_size, bias2, eps, decay
