"""Answering requests over a network: what is asked, checked before it reaches a decoder.

Nothing here imports PyTorch, ONNX or the exporter; a server needs the runtime and its own extra.
"""
