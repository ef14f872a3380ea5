"""Explicit-state export and decoding for block-diffusion models with attention and Mamba layers."""

__all__ = ["__version__"]

__version__ = "0.1.0"
