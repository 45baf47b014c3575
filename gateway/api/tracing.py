"""OpenTelemetry traces with the `gen_ai.*` conventions, from gateway to driver to steps; nothing at all while they are off.

On when the standard variables name a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, …) in the environment of
`yard up`, and the extra `tracing` is installed. Contexts travel as W3C `traceparent`.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
Attribute = str | int | float | bool
_tracer: Any = None
_provider: Any = None


def start(service: str, environment: Mapping[str, str] = os.environ) -> None:
    """Once in a process; without a collector nothing is imported."""
    if _tracer is not None or not any(environment.get(name) for name in ENDPOINTS):
        return
    protocol = "grpc" if environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") == "grpc" else "http"
    try:
        exporter = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter").OTLPSpanExporter()
    except ImportError as error:
        log.warning("traces are asked for, but %s; pip install 'modelyard[tracing]'", error)
        return
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    use(BatchSpanProcessor(exporter), service)


def use(processor: Any, service: str) -> None:
    """Spans go there. What the SDK reads from the environment (sampling, resource attributes) holds."""
    global _tracer, _provider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    _provider = TracerProvider(resource=Resource.create({"service.name": service}))
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("modelyard")


def stop() -> None:
    """Sends what is left."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


def begin(
    name: str,
    traceparent: str = "",
    attributes: Mapping[str, Attribute] | None = None,
    *,
    server: bool = False,
    began_ns: int | None = None,
) -> Any:
    """A span below `traceparent`, if that names one. None while traces are off."""
    if _tracer is None:
        return None
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
    kind = SpanKind.SERVER if server else SpanKind.INTERNAL
    return _tracer.start_span(name, context=parent, kind=kind, attributes=dict(attributes or {}), start_time=began_ns)


def traceparent_of(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def end(span: Any, attributes: Mapping[str, Attribute], error: str = "") -> None:
    span.set_attributes(dict(attributes))
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR, error))
    span.end()


def now_ns() -> int:
    return time.time_ns()
