"""From a PyTorch checkpoint to ONNX graphs with explicit state, compared with PyTorch."""
