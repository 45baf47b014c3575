"""Channel arguments of every gRPC server and channel of the house, so that the two ends agree on pings and sizes.

A peer that is gone without closing its connection (power, network, a stopped process) is found by keepalive in at most
KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS. A server closes connections that ping more often than it allows (`too_many_pings`),
so servers allow more than our clients do.
"""

from __future__ import annotations

import json

MAX_MESSAGE_BYTES = 32 * 2**20
MAX_HEADER_BYTES = 64 * 2**10
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two links to one address are two connections, and a new one connects at once instead of sharing a backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

# For clients of a gateway. A call that reaches a server in the moment it closes is ended by gRPC's core as CANCELLED, before
# anything of it ran: repeated, it goes to another gateway.
RETRY_OPTION: tuple[str, str] = (
    "grpc.service_config",
    json.dumps(
        {
            "methodConfig": [
                {
                    "name": [{}],
                    "retryPolicy": {
                        "maxAttempts": 4,
                        "initialBackoff": "0.05s",
                        "maxBackoff": "1s",
                        "backoffMultiplier": 2,
                        "retryableStatusCodes": ["CANCELLED"],
                    },
                }
            ]
        }
    ),
)


def server_options(message_bytes: int = MAX_MESSAGE_BYTES, header_bytes: int = MAX_HEADER_BYTES) -> list[tuple[str, int]]:
    return [
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", max(message_bytes, MAX_MESSAGE_BYTES)),
        ("grpc.max_metadata_size", header_bytes),
        ("grpc.absolute_max_metadata_size", header_bytes),
    ]


SERVER_OPTIONS = server_options()
