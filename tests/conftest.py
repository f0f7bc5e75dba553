"""One thread, no chatter, kernels interpreted, the same hypothesis examples in every run, nothing learned between runs; and which
tests run on which device (see `devices`)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import transformers
from hypothesis import settings

import devices

os.environ["OUTRIDER_STATISTICS"] = "off"
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
settings.register_profile("outrider", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("outrider")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On another device than the CPU, only tests that are written for any device run, and only if the device is there."""
    if devices.NAME == "cpu":
        return
    reason = devices.why_not()
    if not reason:
        devices.set_up()
    for item in items:
        if item.get_closest_marker("any_device") is None:
            item.add_marker(pytest.mark.skip(reason="for the CPU: leave OUTRIDER_TEST_DEVICE out to run it"))
        elif reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tensors that a test makes are on the device."""
    if devices.NAME == "cpu":
        yield
    else:
        with devices.DEVICE:
            yield
