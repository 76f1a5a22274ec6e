"""Device memory that can be given back and taken again at the same address.

CUDA graphs remember addresses. With CUDA's virtual memory management an address range outlives the memory behind it, so
a suspended engine can free its KV cache and its graphs stay valid.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_mapped_bytes = 0


def mapped_bytes() -> int:
    """Device memory of this process that is held here, outside torch's allocator."""
    return _mapped_bytes


def _checked(result: tuple[Any, ...]) -> Any:
    """Value of a CUDA driver call, which gives (status, value...)."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("no device memory is left for the KV cache")
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA: {text.decode()}")
    return values[0] if values else None


class StaticMemory:
    """`size` bytes at one address of `device` (CUDA), with memory behind it until `release`.

    Raises torch.OutOfMemoryError where there is not enough.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._handle: Any = None
        self._address = 0
        self.device = device
        torch.zeros(1, device=device)  # the context of the device, before the driver is asked
        where = driver.CUmemLocation()
        where.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        where.id = device.index or 0
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = where
        self._access = driver.CUmemAccessDesc()
        self._access.location = where
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = _checked(driver.cuMemGetAllocationGranularity(self._properties, minimum))
        self.size = -(-size // unit) * unit
        self._address = int(_checked(driver.cuMemAddressReserve(self.size, 0, 0, 0)))
        self.restore()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the first bytes; it keeps this object alive and must not be used while released."""
        count = math.prod(shape) * dtype.itemsize
        return torch.as_tensor(self, device=self.device)[:count].view(dtype).view(shape)

    @property
    def released(self) -> bool:
        return self._handle is None

    def release(self) -> None:
        """Give the memory back to the device. Waits for the work that may use it. Idempotent."""
        global _mapped_bytes
        if self._handle is None:
            return
        torch.cuda.synchronize(self.device)
        _checked(self._driver.cuMemUnmap(self._address, self.size))
        _checked(self._driver.cuMemRelease(self._handle))
        self._handle = None
        _mapped_bytes -= self.size

    def restore(self) -> None:
        """Put memory behind the address again; what it holds is undefined. Idempotent."""
        global _mapped_bytes
        if self._handle is not None:
            return
        handle = _checked(self._driver.cuMemCreate(self.size, self._properties, 0))
        try:
            _checked(self._driver.cuMemMap(self._address, self.size, 0, handle, 0))
            _checked(self._driver.cuMemSetAccess(self._address, self.size, [self._access], 1))
        except BaseException:
            self._driver.cuMemRelease(handle)
            raise
        self._handle = handle
        _mapped_bytes += self.size

    def __del__(self) -> None:
        if self._address and not torch._C._cuda_isInBadFork():
            try:
                self.release()
                self._driver.cuMemAddressFree(self._address, self.size)
            except (RuntimeError, TypeError, AttributeError):  # the interpreter or the context is going away
                return
