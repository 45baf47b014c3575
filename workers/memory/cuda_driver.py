"""The CUDA driver calls the memory pool is made of, with plain integers for addresses and handles and exceptions for errors.

The only module that imports cuda-bindings, and only when a `CudaDriver` is made: nothing here needs a GPU to be imported.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.memory.short_calls import CudaError, CudaEvent, ShortCalls, failure

# A grant of a larger range takes over 0.2 ms, during which other threads should run.
SHORT_GRANT_BYTES = 256 * 2**20


class CudaDriver:
    """Virtual memory, copies and pinning for one GPU of this process.

    `peers` are the other GPUs of this process that may read and write what is mapped here. Any thread may call; a thread that
    enqueues copies or pins memory calls `make_current` once before.
    """

    def __init__(self, device: int, peers: tuple[int, ...] = ()) -> None:
        try:
            from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise RuntimeError("GPU memory needs the package cuda-bindings: install modelyard[cuda]") from error
        self._cu: Any = driver
        self.device = device
        self.peers = peers
        torch.cuda.init()
        self._check("cuInit", driver.cuInit(0))
        self._context = self._check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
        self.make_current()
        for peer in peers:
            can = self._check("cuDeviceCanAccessPeer", driver.cuDeviceCanAccessPeer(device, peer))
            if not can:
                raise CudaError(f"GPU {device} and GPU {peer} cannot reach each other's memory; leave {peer} out of the peers")
        self._physical = driver.CUmemAllocationProp()
        self._physical.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._physical.location = self._location(device)
        self._access = [self._grant_to(member) for member in (device, *peers)]
        self._short = ShortCalls(device, peers)

    # ---------------------------------------------------------------- virtual memory

    def granularity_bytes(self) -> int:
        """Sizes and addresses of pages are multiples of this (2 MiB on Hopper)."""
        flag = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return self._check("cuMemGetAllocationGranularity", self._cu.cuMemGetAllocationGranularity(self._physical, flag))

    def create(self, size_bytes: int) -> int:
        """Physical memory; its handle. MemoryError when the GPU has none left."""
        return int(self._check("cuMemCreate", self._cu.cuMemCreate(size_bytes, self._physical, 0)))

    def release(self, handle: int) -> None:
        self._check("cuMemRelease", self._cu.cuMemRelease(handle))

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        """An address range with nothing behind it; its first address."""
        return int(self._check("cuMemAddressReserve", self._cu.cuMemAddressReserve(size_bytes, alignment_bytes, 0, 0)))

    def free_range(self, address: int, size_bytes: int) -> None:
        self._check("cuMemAddressFree", self._cu.cuMemAddressFree(address, size_bytes))

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Put physical memory under an address. Usable after `grant`."""
        self._short.map(address, size_bytes, handle)

    def grant(self, address: int, size_bytes: int) -> None:
        """Let this GPU and its peers read and write a mapped range."""
        if size_bytes <= SHORT_GRANT_BYTES:
            self._short.grant(address, size_bytes)
        else:
            self._check("cuMemSetAccess", self._cu.cuMemSetAccess(address, size_bytes, self._access, len(self._access)))

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take physical memory away from a range that consists of whole mappings."""
        self._check("cuMemUnmap", self._cu.cuMemUnmap(address, size_bytes))

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU as the driver sees them, all processes counted."""
        return torch.cuda.mem_get_info(self.device)

    def allocator_bytes(self) -> int:
        """Bytes that torch's own allocator holds on this GPU, in this process."""
        return torch.cuda.memory_reserved(self.device)

    def storage(self, address: int, size_bytes: int) -> torch.UntypedStorage:
        """Bytes of a reserved range as a torch storage that does not own them. Nothing need be mapped yet.

        The public ways in (`__cuda_array_interface__`) ask the driver which GPU an address is on, which it cannot say of a range
        without pages. torch's own CUDA-graph trees use this constructor for the same reason.
        """
        device = torch.device("cuda", self.device)
        return torch._C._construct_storage_from_data_pointer(address, device, size_bytes)  # pyright: ignore[reportReturnType]

    # ---------------------------------------------------------------- copies

    def make_current(self) -> None:
        """Bind the calling thread to this GPU."""
        torch.cuda.set_device(self.device)
        self._check("cuCtxSetCurrent", self._cu.cuCtxSetCurrent(self._context))

    def stream(self) -> torch.cuda.ExternalStream:
        """A stream of one's own, which never waits for the default stream. (torch's streams come from a pool and are shared.)"""
        flag = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._check("cuStreamCreate", self._cu.cuStreamCreate(flag))
        return torch.cuda.ExternalStream(int(stream), device=self.device)

    def close_stream(self, stream: torch.cuda.ExternalStream) -> None:
        self._check("cuStreamDestroy", self._cu.cuStreamDestroy(stream.cuda_stream))

    def event(self, stream: torch.cuda.ExternalStream) -> CudaEvent:
        """A point in the stream: everything enqueued so far."""
        return CudaEvent(self._short, stream.cuda_stream)

    def copy(self, destination: int, source: int, size_bytes: int, stream: torch.cuda.ExternalStream) -> None:
        """Enqueue a copy between any two of pinned host memory, this GPU and its peers."""
        self._short.copy(destination, source, size_bytes, stream.cuda_stream)

    # ---------------------------------------------------------------- host memory

    def pin(self, address: int, size_bytes: int) -> None:
        """Lock host memory in place, for every GPU of this process."""
        portable = 1  # CU_MEMHOSTREGISTER_PORTABLE
        self._check("cuMemHostRegister", self._cu.cuMemHostRegister(address, size_bytes, portable))

    def unpin(self, address: int) -> None:
        self._check("cuMemHostUnregister", self._cu.cuMemHostUnregister(address))

    # ---------------------------------------------------------------- private

    def _location(self, device: int) -> Any:
        location = self._cu.CUmemLocation()
        location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location

    def _grant_to(self, device: int) -> Any:
        access = self._cu.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _check(self, call: str, answer: tuple[Any, ...]) -> Any:
        status = answer[0]
        if status == self._cu.CUresult.CUDA_SUCCESS:
            return answer[1] if len(answer) == 2 else answer[1:]
        raise failure(call, self.device, int(status), status.name)
