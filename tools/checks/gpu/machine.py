"""What the steps ask of the device: times, CUDA graphs and clocks; and a stand-in on the CPU for a dry run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.machine.devices import ask_nvml, cuda_identity

SM, MEMORY = 1, 2  #: NVML's numbers of clocks


class Machine:
    """A stand-in without a CUDA call: times are of the CPU, and a captured call is called again."""

    device = torch.device("cpu")
    half = torch.float32  #: the dtype of calls that users make

    def synchronize(self) -> None:
        pass

    def median_ms(self, call: Callable[[], Any], repeat_ms: float) -> float:
        """The median time of a call on the device, with a cold L2 cache."""
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def captured(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """The result tensor of a captured call, and what computes it anew."""
        out = call()

        def replay() -> None:
            out.copy_(call())

        return out, replay

    def replay_us(self, replay: Callable[[], None], times: int) -> float:
        """Microseconds of one replay, of many in a row."""
        return self.median_ms(replay, 0.0) * 1e3

    def clocks(self) -> dict[str, Any]:
        """Clocks in MHz, power in W, temperature in degrees Celsius, reasons for lower clocks; None where unknown."""
        return dict.fromkeys(("sm_mhz", "memory_mhz", "most_sm_mhz", "power_w", "temperature_c", "reasons"))


class Cuda(Machine):
    device = torch.device("cuda", 0)
    half = torch.bfloat16

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def median_ms(self, call: Callable[[], Any], repeat_ms: float) -> float:
        testing: Any = importlib.import_module("triton.testing")
        return float(testing.do_bench(call, warmup=repeat_ms / 2, rep=repeat_ms, return_mode="median"))

    def captured(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        return out, graph.replay

    def replay_us(self, replay: Callable[[], None], times: int) -> float:
        event: Any = torch.cuda.Event
        begin, end = (event(enable_timing=True) for _ in range(2))
        replay()
        begin.record()
        for _ in range(times):
            replay()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) / times * 1e3

    def clocks(self) -> dict[str, Any]:
        uuid = cuda_identity(self.device.index)
        handle = ask_nvml("nvmlDeviceGetHandleByUUID", uuid)
        power_mw = ask_nvml("nvmlDeviceGetPowerUsage", handle)
        return {
            "sm_mhz": ask_nvml("nvmlDeviceGetClockInfo", handle, SM),
            "memory_mhz": ask_nvml("nvmlDeviceGetClockInfo", handle, MEMORY),
            "most_sm_mhz": ask_nvml("nvmlDeviceGetMaxClockInfo", handle, SM),
            "power_w": None if power_mw is None else power_mw / 1e3,
            "temperature_c": ask_nvml("nvmlDeviceGetTemperature", handle, 0),
            "reasons": ask_nvml("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
        }


def machine_of(dry_run: bool) -> Machine:
    return Machine() if dry_run else Cuda()
