"""Which layer a kernel belongs to, and what its counters say: on real counters and at the lines between the words."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ncu_files
from dyno.layers import counters
from dyno.layers.counters import Kernel, NcuReport
from dyno.worker.facts.job import LAYERS, MODULES, Layer, LayerGraph

PYTORCH, TENSORRT = (counters.read_ncu(ncu_files.text(name)) for name in (ncu_files.PYTORCH, ncu_files.TENSORRT))
PARTS = ("conv1", "bn1", "relu", "maxpool", *(f"layer1.{k}.{part}" for k in (0, 1) for part in
         ("conv1", "bn1", "relu", "conv2", "bn2", "relu")), "layer1.0", "avgpool", "fc")  # fmt: skip
MODULE = LayerGraph(form=MODULES, library="PyTorch", layers=tuple(Layer(name=name) for name in PARTS))
ENGINE = LayerGraph(
    form=LAYERS,
    library="TensorRT",
    layers=tuple(
        Layer(name=name, nodes=() if "CopyNode" in name else tuple(name.split(" + ")))
        for name in dict.fromkeys(kernel.ranges[-1] for kernel in TENSORRT.kernels)
    ),
)


def test_a_kernel_belongs_to_the_innermost_layer_around_it() -> None:
    owners = counters.owners_of(MODULE, PYTORCH.kernels)
    named = ["" if owner is None else PARTS[owner] for owner in owners]
    assert named[:10] == ["conv1"] * 4 + ["bn1"] * 3 + ["relu", "maxpool", "layer1.0.conv1"] and named[-1] == "fc"
    adds = [k for k, kernel in enumerate(PYTORCH.kernels) if "CUDAFunctor_add" in kernel.name]
    assert named[adds[0]] == "layer1.0", "the block's own addition, in none of its parts"


def test_a_kernel_of_an_engine_belongs_to_the_layer_that_tensorrt_names() -> None:
    owners = counters.owners_of(ENGINE, TENSORRT.kernels)
    names = ["" if owner is None else ENGINE.layers[owner].name for owner in owners]
    assert names == [kernel.ranges[-1] for kernel in TENSORRT.kernels]


def test_the_calls_of_a_module_that_runs_twice_are_told_apart() -> None:
    form = LayerGraph(form=MODULES, layers=(Layer(name="relu"), Layer(name="conv"), Layer(name="relu"), Layer()))
    kernels = [Kernel("k", ranges) for ranges in (("(model)", "relu"), ("(model)", "relu#2"), ("(model)",), ("x",))]
    assert counters.owners_of(form, kernels) == [0, 2, 3, None]


def test_the_table_of_two_forms() -> None:
    forms, reports = (MODULE, ENGINE), {0: PYTORCH, 1: TENSORRT}
    table = counters.make_counters_table(forms, {}, {}, reports, "time", 5)
    for k, report in reports.items():
        rows = [row for row in table.rows if row["form"] == forms[k].library]
        times = [row["time_us"] for row in rows[:-1]]
        assert times == sorted(times, reverse=True) and len(rows) == 6
        assert rows[-1]["modules"] == f"{len(report.kernels) - 5} more kernels" and "finding" not in rows[-1]
        assert sum(row["share"] for row in rows) == pytest.approx(100)
        assert sum(row["time_us"] for row in rows) == pytest.approx(sum(1e6 * one.seconds for one in report.kernels))
        assert sum(row["dram_mb"] for row in rows) == pytest.approx(sum(one.dram_bytes / 1e6 for one in report.kernels))
    first = table.rows[0]
    assert (first["modules"], first["finding"]) == ("maxpool", "compute-bound: SMs at 82 % of their peak")
    assert next(table.parts()).rows[0] == first
    in_order = counters.make_counters_table(forms[:1], {}, {}, {0: PYTORCH}, "graph", 0).rows
    assert [row["kernel"] for row in in_order] == [kernel.name for kernel in PYTORCH.kernels]
    last = in_order[-1]
    assert last["modules"] == "fc" and last["finding"] == "too small a grid: 64 blocks for 132 SMs"


def test_sentences_on_all_kernels_of_a_form() -> None:
    notes = counters.make_counters_table((MODULE, ENGINE), {}, {}, {0: PYTORCH, 1: TENSORRT}, "time", 5).notes
    assert "TensorRT: the tensor cores are idle (up to 2 %) in all 24 kernels." in notes
    (tensor,) = (note for note in notes if note.startswith("PyTorch: the tensor cores"))
    assert tensor.endswith("and are idle (up to 2 %) in the 2 longest kernels.")
    (bounds,) = (note for note in notes if note.startswith("TensorRT: the time of its 24 kernels is"))
    assert bounds.split(" is ")[1].split(" % ")[1].startswith("compute-bound")
    cut = counters.describe_counters(replace(PYTORCH, cut_short="ncu wasn't done after 900 s"), [0] * 45)
    assert cut[0] == "only the first 45 of its kernels were counted: ncu wasn't done after 900 s"
    lost = counters.describe_counters(NcuReport((Kernel("a", seconds=3.0), Kernel("b", seconds=1.0))), [0, None])
    assert lost == ["of no layer: 1 kernel, 25 % of the time"]


FULL = Kernel("k", sm=10.0, memory=10.0, dram=10.0, tensor=0.0, waves=2.0, blocks=264.0, sms=132.0, seconds=1.0)
FINDINGS = {
    "memory-bound: 83 % of DRAM bandwidth": {"memory": 83.0, "dram": 83.0, "sm": 70.0},
    "memory-bound: caches at 60 %, DRAM at 59 %": {"memory": 60.0, "dram": 59.0},
    "compute-bound: SMs at 60 % of their peak": {"sm": 60.0, "memory": 59.9},
    "compute-bound: tensor cores at 64 % of their peak": {"sm": 64.0, "tensor": 64.0},
    "too small a grid: 66 blocks for 132 SMs": {"blocks": 66.0, "waves": 0.5},
    "too small a grid: 1 block for 132 SMs": {"blocks": 1.0, "waves": 0.0},
    "too small a grid: 0.50 of a wave": {"waves": 0.5},
    "latency-bound: SMs at 10 %, memory at 10 %": {"waves": 0.51},
    "": {"sm": float("nan"), "memory": float("nan")},
}


@pytest.mark.parametrize(("said", "figures"), FINDINGS.items())
def test_a_sentence_for_each_kernel(said: str, figures: dict[str, float]) -> None:
    assert counters.describe_bound(replace(FULL, **figures)) == said  # type: ignore[arg-type]


def test_tensor_cores_at_work_and_unknown() -> None:
    busy, idle = replace(FULL, tensor=50.0, seconds=3.0), replace(FULL, tensor=2.0, seconds=1.0)
    said = [
        counters.describe_counters(NcuReport(kernels), [0] * len(kernels))[-1]
        for kernels in ((busy, idle), (idle, busy))
    ]
    assert said == ["the tensor cores work 38 % of the kernels' time"] * 2
    longest = (replace(idle, seconds=9.0), busy)
    assert counters.describe_counters(NcuReport(longest), [0, 0])[-1].endswith(
        "and are idle (up to 2 %) in the longest kernel"
    )
    unknown = replace(FULL, tensor=float("nan"))
    assert not any("tensor" in one for one in counters.describe_counters(NcuReport((unknown,)), [0]))
