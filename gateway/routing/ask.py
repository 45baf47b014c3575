"""What of a request decides where it goes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Quality = Literal["fast", "precise"]
TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Ask:
    """`headers` are those of HTTP or the metadata of gRPC, in lower case. `prompt_tokens` is None until they are counted.

    `pick` and `shadow_pick` are drawn uniformly from [0, 1).
    """

    tenant: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    prompt_tokens: int | None = None
    pick: float = 0.0
    shadow_pick: float = 0.0

    def share(self, route: str, sticky: str | None) -> float:
        """Where in [0, 1) this caller stands for a route: by a hash of what it is known by, or at random.

        The route is part of the hash, so that it is not the same callers who get every route's canary.
        """
        caller = "" if sticky is None else self.tenant if sticky == TENANT else self.headers.get(sticky, "")
        if not caller:
            return self.pick
        digest = hashlib.blake2b(f"{route}\0{caller}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64
