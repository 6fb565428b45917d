"""SiTU-GLU, K3's bounded gated activation."""

from k3rl.kernels.situ.reference import situ_glu

__all__ = ["situ_glu"]
