"""The README of a generated model repository."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = """\
# Model repository of Triton Inference Server

Written by fixedstate {fixedstate} for Triton {target_version} or newer (server {lowest_server}).
Tested with server 2.51.0 (24.10), its Python back end, on a CPU, with Python 3.10 and 3.12 and
numpy 1.26.

| folder | model |
| --- | --- |
{models}

The model `{model}` gives one response for every finished block: `text_output`, `token_ids`,
`block_index`, `prompt_tokens`, and in the last one `finish_reason` (`stop` or `length`) and
`denoise_passes`. A request gives `text_input` or `input_ids`, and parameters: `max_new_tokens` (or
`max_tokens`), `min_new_tokens`, `steps`, `threshold`, `temperature`, `seed`, `stop` (one text),
`stop_ids` (a text such as `1,2`), and where saved states are allowed `state` (base64) and
`return_state`. Anything else is refused. The server itself cuts whole numbers in JSON to 32 bits:
give a larger `seed` as a text.

{slots} requests run together, {queue} wait, more are refused as unavailable (UNAVAILABLE over
gRPC, 400 with the reason on an HTTP stream). A prompt has
{max_prompt_tokens} tokens at most, an answer {max_new_tokens}.

## Start

The model runs in the server's Python stub, whose environment needs what `requirements-stub.txt`
lists{package}. The stub takes the first `python3` on the PATH and ignores
PYTHONPATH; its Python version is that of the server's stub (3.10 in release 24.10).

    pip install -r requirements-stub.txt
    python launch.py

`launch.py` checks libraries and shared memory, ends a start that hangs, asks for one token every
ten seconds, and starts a server anew that does not answer: a stub that died is not restarted by the
server, which goes on to report that it is ready. SIGTERM drains: ports close, open streams end.

In NVIDIA's container (not tried here: no container and no card on the machine of the tests):

    docker run --rm --shm-size={shm}m -p 127.0.0.1:8000-8002:8000-8002 -v $PWD:/models \\
        nvcr.io/nvidia/tritonserver:{target_version}-py3 \\
        sh -c "pip install -r /models/requirements-stub.txt &&
            exec python3 /models/launch.py --address 0.0.0.0"

Without `launch.py`: `tritonserver --model-repository=. --disable-auto-complete-config
--model-control-mode=explicit --load-model={model}`.

Keep the ports to this machine or a network you trust: release 24.10 has no authentication, and one
`/infer` request with a shape of 2**63 - 1 ends the whole server.

## Ask

    curl -N localhost:8000/v2/models/{model}/generate_stream \\
        -d '{{"text_input": "...", "max_new_tokens": 64, "seed": 1}}'
    fixedstate client localhost:8001 --prompt "..." --model {model}

A failure after the first block arrives inside of the stream as `"error"`, with status 200. Streams
of gRPC carry no code, so a message begins with its own. A gRPC client sets deadlines, since a stub
that dies in the middle may leave it without any answer. It does not cancel behind the last
response, which would keep the model from being unloaded, and does not send the header
`triton_grpc_error`: release 24.10 then reads freed memory behind a refusal and may crash.
{more}"""

_LIBRARIES = """
## Plugins

The model itself loads {names} of the engine's folder, after the hash was
checked. No LD_PRELOAD is needed.
"""

_STEP = """
## The step model

`{step}` runs one pass a request with the server's implicit state, on its ONNX Runtime back end. Its
configuration was read back by the server's schema and held against rules and graph, but never run:
no build of that back end was at hand. `launch.py` does not load it. A sequence is one row: its
first request sets START, its last one END, one at a time; without START the server refuses it. The
state begins with zeros. `commit_length` 0 denoises and leaves the state as it is; L commits.
A sequence that is silent for a minute is dropped, and its state with it.
"""


def text(record: Mapping[str, Any], installed: bool) -> str:
    """The README.

    Args:
        record: Of ``repository.json``.
        installed: Whether the package has to be installed in the stub's environment.
    """
    limits = record["limits"]
    lines = {record["model"]: "one response for every block (decoupled)"}
    for name in record["models"][1:]:
        lines[name] = "whole answers for `/generate` and `/infer`; two requests at a time"
    more = ""
    if record["libraries"]:
        names = ", ".join(f"`{name}`" for name in record["libraries"])
        more += _LIBRARIES.format(
            names=names, verb="is" if len(record["libraries"]) == 1 else "are"
        )
    if record["step_model"]:
        lines[record["step_model"]] = "one pass, with implicit state; never run, see below"
        more += _STEP.format(step=record["step_model"])
    version = record["fixedstate"]
    return _TEXT.format(
        **{k: record[k] for k in ("fixedstate", "target_version", "lowest_server", "model")},
        **{k: limits[k] for k in ("slots", "queue", "max_prompt_tokens", "max_new_tokens")},
        models="\n".join(f"| `{name}` | {what} |" for name, what in lines.items()),
        package=f" and fixedstate {version}"
        if installed
        else "; the package lies in the model's folder",
        shm=-(-record["shm_bytes"] >> 20),
        more=more,
    )
