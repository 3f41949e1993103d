"""CUDA calls of `cuda_ipc`: open allocations to other processes, and copy many short runs in one launch.

A GPU copy engine takes a microsecond or two per run, longer than a run of some KiB needs.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from baton.errors import ConfigError, TransportError
from baton.transports.batches import BATCH_RUNS, Runs

HANDLE_BYTES = 64
_THREADS = 256
# Bytes per block; longer runs get several.
_BLOCK_BYTES = 64 << 10
_MOST_BLOCKS = 256
_ROW_BYTES = 3 * 8
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING

_KERNEL = r"""
extern "C" __global__ void copy_runs(const long long* rows, int source, int dest) {
  const long long* row = rows + 3 * blockIdx.y;
  const char* from = (const char*)row[source];
  char* to = (char*)row[dest];
  const long long nbytes = row[2];
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.x * blockDim.x;
  if ((((long long)from | (long long)to) & 15) == 0) {
    const long long wide = nbytes / 16;
    for (long long i = first; i < wide; i += step) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (long long i = 16 * wide + first; i < nbytes; i += step) to[i] = from[i];
  } else {
    for (long long i = first; i < nbytes; i += step) to[i] = from[i];
  }
}
"""


class Exported(NamedTuple):
    """An allocation that others can open, and the offset of an address in it."""

    handle: bytes
    offset: int


class Launch(NamedTuple):
    """A batch in flight. `event`: recorded after it. `table`: read by the kernel."""

    event: Any
    table: int


class CudaDriver:
    """One device, used by one thread at a time. Raises `TransportError` for CUDA errors."""

    def __init__(self, device: int, on_end: Callable[[], None]) -> None:
        """`on_end` is called, on a CUDA thread, when a batch has ended.

        Raises `ConfigError`.
        """
        self._api, nvrtc = _bindings()
        self._call(self._api.cuInit(0))
        handle = self._call(self._api.cuDeviceGet(device))
        # PyTorch uses the primary context.
        self._context = self._call(self._api.cuDevicePrimaryCtxRetain(handle))
        self._call(self._api.cuCtxSetCurrent(self._context))
        module = self._call(self._api.cuModuleLoadData(_compiled(nvrtc)))
        self._kernel = self._call(self._api.cuModuleGetFunction(module, b"copy_runs"))
        self._stream = self._call(self._api.cuStreamCreate(_NON_BLOCKING))
        self._free: list[Launch] = []
        self._called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: on_end())
        self._on_end = self._api.CUhostFn(ctypes.cast(self._called, ctypes.c_void_p).value)

    def _call(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if int(error) != 0:
            raise TransportError(f"CUDA: {getattr(error, 'name', error)}")
        return values[0] if len(values) == 1 else values

    def export(self, address: int) -> Exported:
        base, _ = self._call(self._api.cuMemGetAddressRange(address))
        handle = self._call(self._api.cuIpcGetMemHandle(base))
        return Exported(bytes(handle.reserved), address - int(base))

    def open(self, handle: bytes) -> tuple[int, int]:
        """Returns local address and bytes of another process's allocation."""
        named = self._api.CUipcMemHandle()
        named.reserved = handle
        address = int(self._call(self._api.cuIpcOpenMemHandle(named, _PEER_ACCESS)))
        _, nbytes = self._call(self._api.cuMemGetAddressRange(address))
        return address, int(nbytes)

    def unmap(self, address: int) -> None:
        self._call(self._api.cuIpcCloseMemHandle(address))

    def copy(self, rows: Runs, source: int, dest: int) -> Launch:
        """`rows`: int64 `[runs, 3]`, at most `BATCH_RUNS`. `source` and `dest`: the columns of addresses; the third is
        bytes."""
        launch = self._free.pop() if self._free else self._launch()
        table = np.ascontiguousarray(rows)  # alive while its address is used
        ctypes.memmove(launch.table, table.ctypes.data, table.nbytes)
        blocks = max(1, min(_MOST_BLOCKS, int(rows[:, 2].max()) // _BLOCK_BYTES))
        values = (launch.table, source, dest), (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        self._call(
            self._api.cuLaunchKernel(self._kernel, blocks, len(rows), 1, _THREADS, 1, 1, 0, self._stream, values, 0)
        )
        self._call(self._api.cuEventRecord(launch.event, self._stream))
        self._call(self._api.cuLaunchHostFunc(self._stream, self._on_end, 0))
        return launch

    def _launch(self) -> Launch:
        event = self._call(self._api.cuEventCreate(_NO_TIMING))
        return Launch(event, int(self._call(self._api.cuMemHostAlloc(BATCH_RUNS * _ROW_BYTES, 0))))

    def done(self, launch: Launch) -> bool:
        """Every process sees all bytes of the batch; recycles the launch."""
        (error,) = self._api.cuEventQuery(launch.event)
        if error == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._call((error,))
        self._free.append(launch)
        return True

    def read(self, host: int, address: int, nbytes: int) -> None:
        """Copy to host memory at address `host`, synchronously."""
        self._call(self._api.cuMemcpyDtoH(host, address, nbytes))

    def synchronize(self) -> None:
        self._call(self._api.cuStreamSynchronize(self._stream))


def check_cuda() -> None:
    driver, _ = _bindings()
    (error,) = driver.cuInit(0)
    if int(error) != 0:
        raise ConfigError("transport", f"cuda_ipc:// needs a CUDA device: {error.name}")


def _bindings() -> tuple[Any, Any]:
    try:
        return importlib.import_module("cuda.bindings.driver"), importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise ConfigError(
            "transport", f"cuda_ipc:// needs the package cuda-bindings: pip install 'baton-serve[cuda]' ({error})"
        ) from error


def _compiled(nvrtc: Any) -> bytes:
    def call(answer: tuple[Any, ...]) -> Any:
        if int(answer[0]) != 0:
            raise ConfigError("transport", f"cuda_ipc: NVRTC: {answer[0]}")
        return answer[1] if len(answer) > 1 else None

    program = call(nvrtc.nvrtcCreateProgram(_KERNEL.encode(), b"copy_runs.cu", 0, [], []))
    call(nvrtc.nvrtcCompileProgram(program, 0, []))
    text: bytes = b" " * call(nvrtc.nvrtcGetPTXSize(program))
    call(nvrtc.nvrtcGetPTX(program, text))
    return text
