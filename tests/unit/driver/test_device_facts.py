"""Cards as NVML describes them. NVML itself is the only thing that is not real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workers.rank.device_facts import SWITCH, device_facts


class NvmlError(Exception):
    pass


class Nvml:
    """`links`: bus of a card -> what its links lead to: the bus of another card, or "switch"."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, links: dict[int, list[int | str]], ecc: int = 0, rows: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        self._links = links
        self._ecc = ecc
        self._rows = rows
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> int:
        return int(address.decode().split(":")[1], 16)

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(domain=0, bus=handle, device=0)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if not self._links.get(handle):
            raise NvmlError("not supported")
        return int(link < len(self._links[handle]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self._links[handle][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(domain=0, bus=self._links[handle][link], device=0)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self._ecc

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self._rows


def card(bus: int) -> Any:
    return SimpleNamespace(name="a card", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def test_cards_behind_switches_are_one_domain() -> None:
    nvml = Nvml({0x10: ["switch"], 0x20: ["switch"]})
    assert device_facts(card(0x10), nvml).nvlink_domain == device_facts(card(0x20), nvml).nvlink_domain == SWITCH
    assert nvml.open == 0


def test_pairs_with_bridges_are_domains_of_their_own_and_a_lone_card_has_none() -> None:
    nvml = Nvml({0x10: [0x20], 0x20: [0x10], 0x30: [0x40], 0x40: [0x30]})
    domains = [device_facts(card(bus), nvml).nvlink_domain for bus in (0x10, 0x20, 0x30, 0x40, 0x50)]
    assert domains[0] == domains[1] != domains[2] == domains[3]
    assert domains[4] == ""


def test_what_a_driver_does_not_know_is_left_open() -> None:
    facts = device_facts(card(0x50), Nvml({}))
    assert (facts.type, facts.numa, facts.trouble) == ("NVIDIA H200", -1, "")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Nvml({}, ecc=3), "3 uncorrected memory errors"),
        (Nvml({}, rows=(1, 0, 1, 0)), "reset the card"),
        (Nvml({}, rows=(1, 1, 0, 1)), "replace the card"),
    ],
)
def test_a_card_that_should_take_nothing_says_why(broken: Nvml, words: str) -> None:
    assert words in device_facts(card(0x10), broken).trouble


class NoDriver(Nvml):
    def nvmlInit(self) -> None:
        raise NvmlError("driver not loaded")


def test_without_a_driver_the_name_is_torchs() -> None:
    assert device_facts(card(0x10), NoDriver({})).type == "a card"
