"""The memory of an emulated device."""

from __future__ import annotations

import pytest
import torch

from lightning_hetero.emulation import Emulation
from lightning_hetero.errors import EmulatedOutOfMemoryError
from lightning_hetero.models.units import find_units
from tests.test_emulation import SAMPLES, WIDTH, active_modes, device, model, run


def test_going_over_the_memory_names_rank_type_wanted_and_free() -> None:
    net = model()
    states = 2 * (WIDTH + 1) * WIDTH * 4
    batch_bytes = SAMPLES * WIDTH * 4
    limit = states + 2 * batch_bytes  # room for the batch and one output, not for two
    emulation = Emulation(device(1e12, memory_bytes=limit), 2, find_units(net))
    with pytest.raises(EmulatedOutOfMemoryError) as caught:
        run(emulation, net)
    message = str(caught.value)
    assert "rank 2" in message
    assert "emulated fast" in message
    assert f"wants 32 KiB ({batch_bytes} bytes)" in message
    assert "0 B (0 bytes) are free" in message
    assert isinstance(caught.value, MemoryError)
    assert active_modes() == []


def test_a_step_fits_in_exactly_what_it_needs() -> None:
    net = model()
    emulation = Emulation(device(1e12), 0, find_units(net))
    run(emulation, net)
    peak = emulation.report().peak_bytes
    assert peak is not None
    run(Emulation(device(1e12, memory_bytes=peak), 0, find_units(net := model())), net)
    with pytest.raises(EmulatedOutOfMemoryError):
        run(Emulation(device(1e12, memory_bytes=peak - 1), 0, find_units(net := model())), net)


def test_a_model_that_does_not_fit_is_refused_at_the_start() -> None:
    emulation = Emulation(device(1e12, memory_bytes=1000), 0, find_units(net := model()))
    with pytest.raises(EmulatedOutOfMemoryError, match="parameters wants 129 KiB"):
        emulation.start(net)


def test_memory_need_not_be_accounted() -> None:
    emulation = Emulation(device(1e12, memory_bytes=1000), 0, find_units(net := model()), account_memory=False)
    run(emulation, net, steps=1)
    assert emulation.report().peak_bytes is None


def test_an_out_of_memory_in_the_backward_comes_out_as_it_is() -> None:
    net = model()
    forward = Emulation(device(1e12), 0, find_units(net))
    forward.start(net)
    batch = torch.ones(SAMPLES, WIDTH)
    with forward.step(batch):
        loss = net(batch).sum()
    peak = forward.take_peak_bytes()
    assert peak is not None
    forward.stop()
    del loss
    emulation = Emulation(device(1e12, memory_bytes=peak), 0, find_units(net))
    emulation.start(net)
    with emulation.step(batch):
        loss = net(batch).sum()
        with pytest.raises(EmulatedOutOfMemoryError):
            loss.backward()


# report
