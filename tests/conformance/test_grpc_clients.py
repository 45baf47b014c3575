"""A plain grpcio client generated from the published .proto, gRPC health and reflection, against a running site."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from house import House

pytestmark = pytest.mark.site

PROTO = Path(__file__).parents[2] / "gateway" / "api" / "proto" / "inference.proto"


def protoc(include: Path, proto: Path, out: Path) -> None:
    options = [f"-I{include}", f"--python_out={out}", f"--grpc_python_out={out}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, str(proto)], check=True)


def test_a_client_generated_from_the_published_proto(house: House, tmp_path: Path) -> None:
    """In a process of its own, as a service that knows nothing of this repository but the copied file."""
    (tmp_path / "modelyard.proto").write_bytes(PROTO.read_bytes())
    protoc(tmp_path, tmp_path / "modelyard.proto", tmp_path)
    program = f"""
import grpc, modelyard_pb2 as pb, modelyard_pb2_grpc as rpc
stub = rpc.InferenceStub(grpc.insecure_channel("{house.grpc_address}"))
messages = [pb.Message(role="user", content="What is the capital of France?")]
greedy = pb.Sampling(temperature=0)
chunks = stub.ChatStream(pb.ChatRequest(model="chat", messages=messages, max_tokens=16, sampling=greedy), timeout=60)
chunks = list(chunks)
print("".join(choice.text for chunk in chunks for choice in chunk.choices))
assert chunks[-1].usage.completion_tokens > 0
ids = stub.Tokenize(pb.TokenizeRequest(model="chat", text="Hello world"), timeout=30).ids
assert stub.Detokenize(pb.DetokenizeRequest(model="chat", ids=ids), timeout=30).text == "Hello world"
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Paris" in ran.stdout


def test_health_is_told_per_model(house: House) -> None:
    house.wait_ready("smollm2")
    with grpc.insecure_channel(house.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "smollm2", "chat"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        first = next(stub.Watch(health_pb2.HealthCheckRequest(service="smollm2-pp2"), timeout=10))
        assert first.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services(house: House) -> None:
    with grpc.insecure_channel(house.grpc_address) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"modelyard.v1.Inference", "modelyard.v1.Admin", "grpc.health.v1.Health"} <= services


@pytest.mark.parametrize("module", ["inference", "kserve", "admin", "pool", "trtllm"])
def test_the_generated_code_is_that_of_the_proto(module: str, tmp_path: Path) -> None:
    root = PROTO.parents[3]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{root}",
            f"--python_out={tmp_path}",
            str(PROTO.with_name(f"{module}.proto")),
        ],
        check=True,
    )
    committed = importlib.import_module(f"gateway.api.proto.{module}_pb2").DESCRIPTOR.serialized_pb
    program = f"import gateway.api.proto.{module}_pb2 as m, sys; sys.stdout.buffer.write(m.DESCRIPTOR.serialized_pb)"
    fresh = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=True).stdout
    assert fresh == committed, f"{module}.proto changed: generate gateway/api/proto/{module}_pb2.py again"
