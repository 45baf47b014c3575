"""What a model holds on a GPU, and when that is free again: over an NVML that a script plays."""

from __future__ import annotations

from typing import Any

import pytest

from workers.engines.trtllm import gpu_memory
from workers.engines.trtllm.gpu_memory import DeviceUse, Meter, wait_free


class Script:
    """Answers in order; the last one again and again."""

    def __init__(self, *uses: DeviceUse) -> None:
        self.uses = list(uses)

    def use(self, device: int) -> DeviceUse:
        del device
        return self.uses.pop(0) if len(self.uses) > 1 else self.uses[0]


def nvml(*uses: DeviceUse) -> Any:
    return Script(*uses)


def test_other_models_that_come_later_are_not_counted() -> None:
    meter = Meter(nvml(DeviceUse(10, {1: 10}), DeviceUse(60, {1: 10, 7: 50}), DeviceUse(99, {1: 10, 7: 50, 8: 39}),
                       DeviceUse(60, {1: 10, 7: 5, 8: 45})), [0])  # fmt: skip
    meter.begin()
    assert meter.end() == ([50], [7])
    meter.begin()
    assert meter.end() == ([5], [7])


def test_without_processes_the_change_of_what_is_used_counts() -> None:
    meter = Meter(nvml(DeviceUse(10, {}), DeviceUse(60, {}), DeviceUse(80, {}), DeviceUse(35, {})), [0])
    meter.begin()
    assert meter.end() == ([50], [])
    meter.begin()
    assert meter.end() == ([5], [])


def test_memory_is_free_when_the_processes_are_gone_and_what_they_held_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 3: freed bytes are measured, not assumed."""
    monkeypatch.setattr(gpu_memory, "POLL_S", 0.0)
    late = nvml(DeviceUse(60, {7: 50}), DeviceUse(60, {}), DeviceUse(12, {}))
    seen = wait_free(late, [0], [7], held=[50], used=[60], timeout_s=5)
    assert (seen["free"], seen["freed"]) == (True, [48])
    stuck = nvml(DeviceUse(60, {7: 50}))
    assert wait_free(stuck, [0], [7], held=[50], used=[60], timeout_s=0.01)["free"] is False


def test_memory_that_others_took_meanwhile_does_not_hold_it_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "POLL_S", 0.0)
    monkeypatch.setattr(gpu_memory, "STEADY_S", 0.05)
    assert wait_free(nvml(DeviceUse(60, {9: 50})), [0], [7], held=[50], used=[60], timeout_s=5)["free"] is True
