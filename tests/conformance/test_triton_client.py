"""The real tritonclient from PyPI, unchanged, against a running site."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from house import House

pytestmark = pytest.mark.site

PROMPT = "The capital of France is"


def run(house: House, program: str) -> dict:
    """In a process of its own: the client registers the protocol's messages, as the gateway does. What it prints last is JSON."""
    prelude = f"""
import json, queue
import numpy as np
import tritonclient.grpc as triton
client = triton.InferenceServerClient("{house.grpc_address}")
PROMPT = {PROMPT!r}

def tensor(name, datatype, values):
    values = np.array(values, dtype=object if datatype == "BYTES" else triton.triton_to_np_dtype(datatype))
    given = triton.InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given
"""
    # The client's own threads may keep its interpreter from ending.
    command = [sys.executable, "-c", prelude + program + "import os, sys; sys.stdout.flush(); os._exit(0)"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_infer(house: House) -> None:
    found = run(
        house,
        """
inputs = [tensor("text_input", "BYTES", [[PROMPT]]), tensor("max_tokens", "INT32", [[8]]), tensor("temperature", "FP32", [[0.0]])]
result = client.infer("smollm2", inputs, request_id="7", outputs=[triton.InferRequestedOutput("text_output")])
ids = client.infer("smollm2", [tensor("input_ids", "INT32", [[504, 3575]]), *inputs[1:]]).as_numpy("output_ids")
response = result.get_response()
print(json.dumps([response.id, result.as_numpy("text_output").shape, result.as_numpy("text_output")[0][0].decode(), len(ids[0])]))
""",
    )
    assert found[:2] == ["7", [1, 1]]
    assert "Paris" in found[2]
    assert 1 <= found[3] <= 8


def test_a_stream_of_several_requests(house: House) -> None:
    found = run(
        house,
        """
responses = queue.Queue()
client.start_stream(lambda result, error: responses.put((result, error)))
for id, stream in (("whole", False), ("parts", True), ("wrong", True)):
    inputs = [tensor("text_input", "BYTES", [PROMPT]), tensor("max_tokens", "INT32", [8]), tensor("stream", "BOOL", [stream])]
    inputs.append(tensor("temperature", "FP32", [0.0]))
    client.async_stream_infer("smollm2" if id != "wrong" else "nobody", inputs, request_id=id)
texts, chunks, errors, left = {"whole": "", "parts": ""}, {"whole": 0, "parts": 0}, [], 3
while left:
    result, error = responses.get(timeout=60)
    if error is not None:
        errors.append(error.message())
        left -= 1
        continue
    response = result.get_response()
    texts[response.id] += result.as_numpy("text_output")[0].decode()
    chunks[response.id] += 1
    left -= response.parameters["triton_final_response"].bool_param
client.stop_stream()
print(json.dumps({"texts": texts, "chunks": chunks, "errors": errors}))
""",
    )
    assert found["texts"]["whole"] == found["texts"]["parts"]
    assert "Paris" in found["texts"]["whole"]
    assert found["chunks"]["whole"] == 1
    assert found["chunks"]["parts"] > 2
    assert len(found["errors"]) == 1
    assert "nobody" in found["errors"][0]


def test_the_server_and_its_repository(house: House) -> None:
    house.wait_ready("smollm2", "smollm2-pp2")
    found = run(
        house,
        """
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("chat")
assert not client.is_model_ready("nobody")
metadata = client.get_model_metadata("chat", as_json=True)
config = client.get_model_config("chat", as_json=True)["config"]
assert config["model_transaction_policy"]["decoupled"]

def states():
    return {entry.name: entry.state for entry in client.get_model_repository_index().models}

seen = [states()["smollm2-pp2"]]
client.unload_model("smollm2-pp2")
seen.append(states()["smollm2-pp2"])
client.load_model("smollm2-pp2")
seen.append(states()["smollm2-pp2"])
statistics = client.get_inference_statistics("smollm2", as_json=True)["model_stats"][0]
try:
    client.get_model_metadata("nobody")
except triton.InferenceServerException as error:
    refused = error.status()
inputs = [entry["name"] for entry in metadata["inputs"]]
print(json.dumps({"seen": seen, "inputs": inputs, "refused": refused, "named": statistics["name"]}))
""",
    )
    assert found["seen"] == ["READY", "UNAVAILABLE", "READY"]
    assert {"text_input", "max_tokens", "stream", "stop_words", "temperature", "top_k", "top_p", "random_seed"} <= {
        *found["inputs"]
    }
    assert (found["refused"], found["named"]) == ("StatusCode.NOT_FOUND", "smollm2")
