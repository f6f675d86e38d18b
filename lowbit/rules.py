"""The mathematics of each optimizer on fp32 values: pure functions, one of them a rule.

A rule takes the weight, the gradient, the two moments, each already times its beta (which joins the scale of a block
when it is decoded), and the scalars of the step, and returns the new weight and moments. The scalars of a step come
from :func:`scalars`.
"""

from lowbit.ops import constexpr, divide, exp, jit, log, sqrt, tl, where  # noqa: F401  the interpreter looks for tl here


@jit
def adamw(w, g, m, v, rest1, rest2, bias2, eps, decay, factor):
    """AdamW, decoupled weight decay (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    ``rest1`` is 1 - beta1 times the gradient's ``factor``, ``rest2`` is 1 - beta2 times its square, ``bias2`` is
    1 / sqrt(1 - beta2^t), ``decay`` is lr * weight_decay. The step's size, lr / (1 - beta1^t), divides ``bias2`` and
    ``eps``, which is one multiplication less here.
    """
    m = m + g * rest1
    v = v + g * rest2 * g
    return w - w * decay - divide(m, sqrt(v) * bias2 + eps), m, v


@jit
def adam(w, g, m, v, rest1, rest2, bias2, eps, decay, factor):
    """Adam (Kingma and Ba, https://arxiv.org/abs/1412.6980): weight decay is an L2 term of the gradient.

    The gradient needs its ``factor`` before the decay joins it, so ``rest1`` and ``rest2`` are without.
    """
    return adamw(w, g * factor + w * decay, m, v, rest1, rest2, bias2, eps, 0.0, 1.0)


@jit
def scalars(step, lr, beta1, beta2, eps, weight_decay, factor, DECOUPLED: constexpr):
    """The scalars of step number ``step``, counted from 1, in float64: the betas, and the six of a rule.

    ``factor`` is what the gradient is to be multiplied by (-1 to maximize, or the inverse of a loss scale);
    ``DECOUPLED`` as in AdamW.
    """
    per_step = where(lr > 0.0, (1.0 - exp(step * log(beta1))) / lr, 1.0)
    bias2 = exp(-0.5 * log(1.0 - exp(step * log(beta2)))) * per_step
    eps = where(lr > 0.0, eps * per_step, 1e300)  # infinite in fp32: without a learning rate nothing moves
    decay = lr * weight_decay if DECOUPLED else weight_decay
    joined = factor if DECOUPLED else 1.0
    return (
        beta1, beta2, (1.0 - beta1) * joined, (1.0 - beta2) * joined * joined, bias2, eps, decay, factor
    )  # fmt: skip
