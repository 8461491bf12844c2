"""ncu's CSV, read: what ncu printed on an H200; see `ncu_files`."""

from __future__ import annotations

import math

import pytest

from dyno.layers import counters
from ncu_files import PYTORCH, TENSORRT, text


def test_kernels_have_their_figures_and_the_ranges_around_them() -> None:
    kernels = counters.read_ncu(text(PYTORCH)).kernels
    assert len(kernels) == 45
    first, last = kernels[0], kernels[-1]
    assert first.name == "engines_precompiled::nchwToNhwcKernel<__half, __half, float, 0, 1, 0>"
    assert first.ranges == ("resnet", "conv1") and first.seconds == pytest.approx(65.792e-6)
    assert (first.sm, first.memory, first.dram, first.dram_bytes) == (77.34, 36.68, 7.84, 24_822_272)
    assert (first.warps, first.l2, first.waves, first.tensor) == (88.24, 64.24, 47.52, 0)
    assert (first.blocks, first.threads, first.registers, first.sms) == (50176, 256, 32, 132)
    assert last.ranges == ("resnet", "fc") and (last.blocks, last.tensor) == (64, 0.73)
    assert {"layer1.0.conv1", "layer1.1.conv1", "layer4.1.relu"} <= {kernel.ranges[-1] for kernel in kernels}


def test_ranges_of_tensorrt_whose_quotes_ncu_leaves_as_they_are() -> None:
    kernels = counters.read_ncu(text(TENSORRT)).kernels
    assert len(kernels) == 24
    assert {kernel.ranges[0] for kernel in kernels} == {"ExecutionContext::enqueue"}
    assert [kernel.ranges[-1] for kernel in kernels[:3]] == [
        "node_Conv_292 + node_relu", "node_max_pool2d", "node_Conv_294 + node_relu_1",
    ]  # fmt: skip
    copies = [kernel for kernel in kernels if kernel.ranges[-1].startswith("Reformatting CopyNode for ")]
    assert {kernel.name.split("<")[0] for kernel in copies} <= {"cuInt8::nchwToNhwcKernel", "cuInt8::nhwcToNchwKernel"}
    assert not any(math.isnan(value) for kernel in kernels for value in (kernel.seconds, kernel.dram_bytes, kernel.l2))


def test_a_range_with_its_layer_s_name_alone() -> None:
    around = '22435  ""TensorRT:conv (a) + relu:none:none:RGB:0xffffd700:REGISTERED:conv (a) + relu"" '
    line = next(line for line in text(PYTORCH).split("\n") if line.startswith('"0"'))
    begin, end = line.index('"19737  ') + 1, line.index(' ","","void') + 1
    kernels = counters.read_ncu(text(PYTORCH).replace(line, line[:begin] + around + line[end:])).kernels
    assert kernels[0].ranges == ("conv (a) + relu",) and kernels[0].seconds == pytest.approx(65.792e-6)


def test_what_isn_t_there_is_no_number_and_half_a_line_no_kernel() -> None:
    lines = text(PYTORCH).rstrip("\n").split("\n")
    without = "\n".join([*lines[:5], lines[5].replace('"77.34"', '"n/a"'), lines[6][:90]])
    (kernel,) = counters.read_ncu(without).kernels
    assert math.isnan(kernel.sm) and kernel.memory == 36.68
    old = text(PYTORCH).replace("launch__sm_count", "another")
    assert math.isnan(counters.read_ncu(old).kernels[0].sms)


def test_errors_are_ncu_s_own_and_nothing_is_no_kernel() -> None:
    said = "==PROF== Connected to process 1 (/usr/bin/python3)\n==ERROR== ERR_NVGPUCTRPERM - no permission\nfoo\n"
    assert counters.read_ncu(said) == counters.NcuReport((), ("ERR_NVGPUCTRPERM - no permission",))
    assert counters.read_ncu("") == counters.NcuReport(())
