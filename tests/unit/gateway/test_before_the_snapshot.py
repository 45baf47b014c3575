"""A gateway that has just started knows nothing yet, and says that instead of denying what there may be."""

from __future__ import annotations

import random

import pytest

from gateway.api.errors import ErrorCode, YardError
from gateway.link.link_set import LinkSet
from gateway.servers.generation_path import GenerationPath
from gateway.state.snapshot import Snapshot
from gateway.state.view import SiteView
from gateway.text.library import TextLibrary


async def test_rule_13_no_name_is_missing_before_the_site_was_read() -> None:
    view = SiteView()
    path = GenerationPath(view, TextLibrary(None), LinkSet(gateway="g", secret="s"), random.Random(1), None)  # type: ignore[arg-type]
    with pytest.raises(YardError) as early:
        path.resolve("chat")
    assert early.value.code is ErrorCode.UNAVAILABLE
    view.apply_desired(Snapshot(1, {}))
    with pytest.raises(YardError) as known:
        path.resolve("chat")
    assert known.value.code is ErrorCode.NOT_FOUND
