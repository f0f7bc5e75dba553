"""What this machine is good at, how a model's trees are scored on it, and what memory a run needs."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.bench.report import capabilities, provenance
from outrider.models.factor_model import FactorTreeModel
from outrider.models.loading import list_models, pick_device, pick_dtype
from outrider.models.streaming import streaming
from outrider.topology_report import examine_topology, render_topology

NODES = (1, 4, 8, 16, 32)


def examine(target: str | None, drafter: str, topology: bool = False, **loading: Any) -> dict[str, Any]:
    """Everything `doctor` reports, as plain data.

    Args:
        target: a model to load and test; None examines the machine alone.
        drafter: likewise, "off" for none.
        topology: report which way scores which trees fastest, for the target's recurrent layers or, without a target, for the
            sizes of well-known models; what was never measured here is measured.
    """
    report: dict[str, Any] = {"machine": _machine(), "aliases": {m.name: _standing(m) for m in list_models()}}
    if target is not None:
        from outrider.api import load

        engine = load(target, drafter, **loading)
        report["target"] = _examine_model(engine.model, engine.target, engine.selftest)
        if engine.drafter is not None:
            report["drafter"] = {"name": engine.drafter.name}
            model = getattr(engine.drafter, "model", None)
            if model is not None:
                report["drafter"] |= {"way": model.way, **_memory(model)}
        report["advice"] = _advice(report)
    if topology:
        of_target = engine.target if target is not None else None
        report["topology"] = examine_topology(pick_device(loading.get("device")), of_target)
    return report


def _machine() -> dict[str, Any]:
    facts = provenance()
    device = pick_device(None)
    machine = {
        "system": platform.platform(),
        "cpu": facts.get("cpu"),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _total_memory(),
        "capabilities": capabilities(),
        "device": str(device),
        "default_dtype": str(pick_dtype(device)).removeprefix("torch."),
        "versions": facts["versions"],
    }
    machine["matmul_ms"] = {
        str(d).removeprefix("torch."): _matmul_ms(d, device) for d in (torch.float32, torch.bfloat16)
    }
    return machine


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _matmul_ms(dtype: torch.dtype, device: torch.device) -> dict[int, float]:
    """Milliseconds of one [n, 1024] x [1024, 4096] product, best of several, by number of rows n."""
    weight = torch.randn(4096, 1024).to(device=device, dtype=dtype)
    found = {}
    for rows in NODES:
        x = torch.randn(rows, 1024).to(device=device, dtype=dtype)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            float(torch.nn.functional.linear(x, weight)[0, 0])  # reading a value waits for the device
            times.append(time.perf_counter() - start)
        found[rows] = round(min(times) * 1e3, 3)
    return found


def _standing(info: Any) -> str:
    return "ready" if info.is_converted else "fetched" if info.is_fetched else "not fetched"


def _examine_model(model: Any, tree_model: Any, selftest: Any) -> dict[str, Any]:
    return {
        "family": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "way": selftest.way,
        "fast": selftest.way.endswith("tree mask"),
        "tree_error": selftest.error,
        "chunked_prefill": selftest.chunked_prefill,
        "context": tree_model.context,
        "notes": selftest.notes,
        **_memory(tree_model),
        **(streamed.facts() if (streamed := streaming(model)) else {}),
    }


def _memory(tree_model: Any) -> dict[str, Any]:
    """Bytes: weights, a committed token, a pending node."""
    model = tree_model.model
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    short, longer = tree_model.begin([[0] * 2], 0).bytes(), tree_model.begin([[0] * 66], 0).bytes()
    found = {
        "weight_bytes": sum(weights.values()),
        "bytes_per_token": (longer - short) // 64,
        "state_bytes_per_node": tree_model.state_bytes_per_node(),
    }
    layouts = getattr(getattr(tree_model, "decoder", None), "layouts", ())
    if any(layout.codes for layout in layouts):
        found["held_bytes"] = sum(layout.memory.numel() for layout in layouts)
    if screen := getattr(tree_model, "screen", None):
        found["screen_bytes"] = screen.bytes
    if isinstance(tree_model, FactorTreeModel):
        found["dense_bytes_per_node"] = tree_model.dense_bytes_per_node()
    return found


def _advice(report: dict[str, Any]) -> list[str]:
    target, advice = report["target"], []
    if not target["fast"]:
        advice.append(f"trees are scored by {target['way']}: right, but slower than one masked pass")
    memory = report["machine"]["memory_bytes"]
    context = target["context"] or 8192
    held = target.get("held_bytes", target["weight_bytes"])
    weights = min(held, target.get("memory_budget_bytes", held))
    need = (
        weights
        + target.get("screen_bytes", 0)
        + context * target["bytes_per_token"]
        + 65 * target["state_bytes_per_node"]
    )
    if memory and need > 0.9 * memory:
        advice.append(f"a full context of {context} tokens needs {need / 1e9:.1f} GB, more than this machine has")
    times = report["machine"]["matmul_ms"].get(target["dtype"])
    if times and times[16] > 3 * times[1]:
        advice.append(
            f"16 rows cost {times[16] / times[1]:.1f} times one row in this dtype, so small trees pay most; `auto` sees to it"
        )
    return advice


LABELS = {
    "held_bytes": "weights as they are read, in twelve bits a number where that is exact",
    "screen_bytes": "vocabulary head in bytes, by which logits are screened",
}


def render(report: dict[str, Any], console: Console) -> None:
    """For people."""
    machine = report["machine"]
    table = Table(title="machine", show_header=False)
    for key in ("cpu", "cores", "threads", "device", "default_dtype"):
        table.add_row(key, str(machine[key]))
    if machine["memory_bytes"]:
        table.add_row("memory in all", f"{machine['memory_bytes'] / 2**30:.0f} GiB")
    table.add_row("capabilities", ", ".join(machine["capabilities"]) or "none known")
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in machine["versions"].items()))
    for dtype, times in machine["matmul_ms"].items():
        table.add_row(f"{dtype} [n, 1024] x [1024, 4096]", ", ".join(f"n = {n}: {ms} ms" for n, ms in times.items()))
    table.add_row("models", ", ".join(f"{name}: {state}" for name, state in report["aliases"].items()))
    console.print(table)
    if "topology" in report:
        render_topology(report["topology"], console)
    for part in ("target", "drafter"):
        if part in report:
            table = Table(title=part, show_header=False)
            for key, value in report[part].items():
                label = key.replace("_bytes", "").replace("bytes_", "memory ").replace("_", " ")
                table.add_row(LABELS.get(key, label), _readable(key, value))
            console.print(table)
    for line in report.get("advice", []):
        console.print(f"note: {line}")


def _readable(key: str, value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "bytes" in key:
        return f"{value / 2**20:.2f} MiB" if value >= 2**20 else f"{value:,} B"
    return f"{value:.1e}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
