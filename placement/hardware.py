"""What devices can do, by type. A table of constants with their sources; measurements at a site correct what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """`*_bytes_per_s` are of one device and one direction. `flops`: dense, with 16-bit and with 8-bit operands."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_16bit: float
    flops_8bit: float  # as the 16-bit one where the device has no 8-bit matrix units for floating point
    link_bytes_per_s: float  # to a device of the same domain: NVLink, else PCIe
    host_bytes_per_s: float  # pinned host memory over PCIe
    load_bytes_per_s: float = 3e9  # from disk: a local NVMe drive through the page cache


def _gpu(
    name: str, gib: int, memory: float, flops_16bit: float, flops_8bit: float, link: float, host: float
) -> tuple[str, Hardware]:
    return name, Hardware(name, gib * GIB, memory * 1e9, flops_16bit * 1e12, flops_8bit * 1e12, link * 1e9, host * 1e9)


# Memory and compute: NVIDIA's data sheets (dense figures: half of those "with sparsity"). Links: the data sheets' NVLink total
# halved for one direction; PCIe cards 80 % of the nominal 16 / 32 / 64 GB/s of generations 3 / 4 / 5 (the share measured on the
# H200: 55.3 of 64 GB/s less its protocol). H200: link and host as measured on one.
#        name          GiB  GB/s  TFLOPS 16, 8 bit  link  host
HARDWARE: dict[str, Hardware] = dict(
    (
        _gpu("T4", 16, 320, 65, 65, 12, 12),
        _gpu("V100", 32, 900, 125, 125, 150, 12),
        _gpu("A10", 24, 600, 125, 125, 25, 25),
        _gpu("A30", 24, 933, 165, 165, 100, 25),
        _gpu("A40", 48, 696, 150, 150, 56, 25),
        _gpu("A100", 80, 2039, 312, 312, 300, 25),
        _gpu("RTX 3090", 24, 936, 71, 71, 25, 25),
        _gpu("RTX 4090", 24, 1008, 165, 330, 25, 25),
        _gpu("RTX A6000", 48, 768, 155, 155, 56, 25),
        _gpu("L4", 24, 300, 121, 242, 25, 25),
        _gpu("L40S", 48, 864, 362, 733, 25, 25),
        _gpu("H100 PCIe", 80, 2000, 756, 1513, 51, 51),
        _gpu("H100", 80, 3350, 989, 1979, 450, 51),
        _gpu("H20", 96, 4000, 148, 296, 450, 51),
        _gpu("H200", 141, 4800, 989, 1979, 390, 55.3),
        _gpu("B200", 180, 8000, 2250, 4500, 900, 55.3),
    )
)
# What a type is taken for that the table does not have: the slowest of those in use for serving, so that no SLO is promised
# which the card cannot keep.
UNKNOWN = HARDWARE["L4"]

# One rank of a CPU pool: one core of an AMD EPYC. Fitted to two measurements of the default model, 4-bit, one thread:
# 71.3 tokens/s with one stream and 203.7 with 8 (results/engine-2026-11-30.json): 10.4 ms a step and 3.6 ms a sequence.
CPU = Hardware("CPU core", 8 * GIB, 9.5e9, 75e9, 75e9, 3e9, 5e9, 0.5e9)


def hardware_of(kind: str, type_: str) -> Hardware:
    """`type_` as NVML names a card, for example "NVIDIA A100-SXM4-80GB". The longest name of the table in it counts."""
    if kind == "cpu":
        return CPU
    words = type_.upper().replace("-", " ").split()
    found = [each for each in HARDWARE.values() if _is_in(each.name.upper().split(), words)]
    return max(found, key=lambda each: len(each.name), default=UNKNOWN)


def _is_in(name: list[str], words: list[str]) -> bool:
    return all(word in words for word in name)
