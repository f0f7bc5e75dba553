"""What this machine is, as far as speed depends on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def cpuinfo(key: str) -> str:
    """The first value that Linux gives to a key such as "flags"; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def cpu_name() -> str:
    """The CPU's name."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def machine_name(device: torch.device) -> str:
    """The device that a model runs on, and how much of it: what measured times belong to."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def disk_bytes_read() -> int | None:
    """Bytes that disks have sent to this process so far, without what the kernel had cached; None where it is not counted."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), None)


def settle(device: torch.device) -> None:
    """Wait until a device has done what it was given: only then does a clock tell what its work took. A CPU has at once."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).synchronize()
