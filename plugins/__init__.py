"""Per operator: its ports, its numpy reference, its ONNX function body and its kernel."""
