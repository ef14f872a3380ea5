"""Block decoding on a bundle: numpy and one back end, no PyTorch, no ONNX package."""

__all__: list[str] = []
