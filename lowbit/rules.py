"""The mathematics of each optimizer on fp32 values: pure functions, one of them a rule.

A rule takes the weight, the gradient, the two moments and the scalars of the step, and returns the new weight and
moments. The scalars are computed once a step, in float64, by :func:`scalars`.
"""

import math

from lowbit.ops import divide, jit, sqrt, tl  # noqa: F401  Triton's interpreter looks for tl in the module of a formula


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


def scalars(decoupled, step, lr, betas, eps, weight_decay):
    """The eight scalars of a rule for step number ``step``, counted from 1; ``decoupled`` as in AdamW."""
    beta1, beta2 = (float(beta) for beta in betas)
    lr = float(lr)
    return (
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
        float(eps),
        lr * float(weight_decay) if decoupled else float(weight_decay),
    )
