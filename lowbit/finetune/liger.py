"""Kernels of Liger (https://github.com/linkedin/Liger-Kernel) in place of a model's own operations."""

from lowbit.finetune.errors import UserError


def apply(model, device):
    """Let ``model`` use Liger's kernels for norms, rotary positions and gated MLPs on ``device``, in place.

    Not Liger's losses: ours needs the logits of target positions only.

    Raises:
        UserError: not a GPU, Liger is not installed, or has no kernels for this kind of model.
    """
    if device.type != "cuda":
        raise UserError(f"--liger needs a GPU and --device is {device.type}: leave --liger off, or give --device cuda")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    except ImportError as error:
        raise UserError(f"--liger: liger_kernel can't be imported ({error}): pip install liger-kernel") from error
    kind = model.config.model_type
    if kind not in known:
        raise UserError(f"--liger: Liger has no kernels for models of type {kind}: leave --liger off")
    _apply_liger_kernel_to_instance(
        model=model, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
