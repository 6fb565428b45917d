"""What every kernel's folder needs: the choice between Triton and reference, and Triton's interpreter made right."""

from k3rl.kernels.common.dispatch import choose_backend, refuse

__all__ = ["choose_backend", "refuse"]
