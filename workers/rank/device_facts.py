"""What a card is and how it hangs on its node, asked of NVML and the kernel once when a rank starts: placement chooses by it.

NVML comes with `nvidia-ml-py` (imported as `pynvml`), which torch's CUDA builds use too. Without it, or without a card, no
links are known, and placement takes the devices of a node for one domain.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Protocol

from workers.messages import DeviceFacts
from workers.rank.numa import node_of

log = logging.getLogger(__name__)

SWITCH = "nvswitch"
"""The domain of all cards that reach each other through NVSwitch: their links end in switches, not in cards."""


class Card(Protocol):
    """What torch says of a device (`torch.cuda.get_device_properties`)."""

    name: str
    pci_domain_id: int
    pci_bus_id: int
    pci_device_id: int


def device_facts(card: Card, nvml: Any = None) -> DeviceFacts:
    """`nvml`: the module, for tests; by default `pynvml`, where it can be imported."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError as error:
        return _unknown(card, error)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _unknown(card, error)
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(_bus(card.pci_domain_id, card.pci_bus_id, card.pci_device_id).encode())
        return DeviceFacts(
            type=_text(nvml.nvmlDeviceGetName(handle)),
            nvlink_domain=_domain(nvml, handle),
            numa=_numa(card),
            trouble=_trouble(nvml, handle),
        )
    except (nvml.NVMLError, AttributeError) as error:  # a card that NVML does not show, or an NVML older than the questions
        return _unknown(card, error)
    finally:
        nvml.nvmlShutdown()


def _unknown(card: Card, why: Exception) -> DeviceFacts:
    log.warning("NVML does not answer (%s): links and health of %s are not known", why, card.name)
    return DeviceFacts(type=card.name, numa=_numa(card))


def _numa(card: Card) -> int:
    """By the kernel: NVML's own question is about cards whose memory is a NUMA node."""
    return node_of(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")


def _domain(nvml: Any, handle: Any) -> str:
    """Cards that are linked directly or over others, by the lowest bus address among them; "" for a card without links."""
    seen: set[str] = set()
    reached = [handle]
    while reached:
        current = reached.pop()
        address = _address(nvml.nvmlDeviceGetPciInfo(current))
        if address in seen:
            continue
        seen.add(address)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not _ask(nvml, "nvmlDeviceGetNvLinkState", current, link, default=0):
                continue
            kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", current, link, default=None)
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                return SWITCH
            remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", current, link, default=None)
            if remote is not None:
                other = _ask(nvml, "nvmlDeviceGetHandleByPciBusId", _address(remote).encode(), default=None)
                if other is not None:
                    reached.append(other)
    return min(seen) if len(seen) > 1 else ""


def _trouble(nvml: Any, handle: Any) -> str:
    """Why the card should take nothing."""
    uncorrected = _ask(
        nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC, default=0
    )
    if uncorrected:
        return f"{uncorrected} uncorrected memory errors since the driver was loaded; reset or replace the card"
    remapped = _ask(nvml, "nvmlDeviceGetRemappedRows", handle, default=None)
    if remapped is not None:
        _, _, pending, failed = remapped
        if failed:
            return "a row of its memory could not be remapped; replace the card"
        if pending:
            return "rows of its memory wait to be remapped; reset the card"
    return ""


def _ask(nvml: Any, call: str, *arguments: Any, default: Any) -> Any:
    """Older drivers and smaller cards do not know every question."""
    question = getattr(nvml, call, None)
    if question is None:
        return default
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


def _address(info: Any) -> str:
    return _bus(info.domain, info.bus, info.device)


def _bus(domain: int, bus: int, device: int) -> str:
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
