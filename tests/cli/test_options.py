"""Flags and study files that make no sense are one line each, which says what is wrong and what to write."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "resnet18"], "torchvision and timm each have a model resnet18; give torchvision:resnet18"),
        (["run", "none.onnx"], "there is no model file none.onnx"),
        (["run", "none.py:f"], "there is no Python file none.py"),
        (["run", "none.toml"], "there is no study file none.toml"),
        (["run", "fake:n", "--backend", "onnxruntim"], "unknown backend 'onnxruntim'; did you mean 'onnxruntime'?"),
        (["run", "fake:n", "--backend", "fake@a"], "backend option 'a' in 'fake@a' is not NAME=VALUE"),
        (["run", "fake:n", "--precision", "fp61"], "unknown precision 'fp61'; did you mean 'fp16'?"),
        (["run", "fake:n", "--batch", "1,x"], "--batch 'x' is not a whole number; write e.g. --batch 1,8,32"),
        (["run", "fake:n", "--batch", "0"], "batch sizes must be whole numbers of at least 1, not 0"),
        (["bench", "serve", "fake:n", "--rate", "1,x"], "--rate 'x' is not a number; write e.g. --rate 20,40,80"),
        (["run", "fake:n", "--size", "12y"], "image size '12y' is not a number of pixels like 224"),
        (["run", "fake:n", "--budget", "top1"], "budget 'top1' is not NAME=POINTS, e.g. top1=0.5"),
        (["run", "fake:n", "--limit", "p99"], "limit 'p99' is not NAME=MOST, e.g. p99=5ms or size=20MB"),
        (["run", "fake:n", "--limit", "p98=1ms"], "unknown limit 'p98'; did you mean 'p99'?"),
        (["run", "fake:n", "--limit", "size=5ms"], "limit size=5ms is not a number with a unit (B, kB, KB, MB, GB, "),
        (["run", "fake:n", "--limit", "p99=5"], "limit p99=5 is not a number with a unit (s, ms, us, ns); write e.g."),
        (["run", "fake:n", "--limit", "p99=0ms"], "limit p99=0ms must be more than 0, e.g. p99=5ms"),
        (["run", "fake:n", "--limit", "p99=1ms,p99=2ms"], "the limit p99 is given twice, as 1ms and 2ms; give it once"),
        (["run", "fake:n", "--limit", "energy=1J"], "the limit energy=1J needs the energy measured; add --energy"),
        (["run", "fake:n", "--limit", "p50=1s", "--boundaries", "all"], "the limit p50=1s is on latency/model; add"),
        (["run", "fake:n", "--budget", "top1=1"], "an accuracy budget needs labelled images; give --data"),
        (["run", "fake:n", "--budget", "top1=-1", "--data", "digits"], "budget top1=-1 must be between 0 and 100"),
        (
            ["run", "fake:n", "--channels", "1", "--backend", "fake", "--budget", "mAP=1", "--data", "digits"],
            "n is for classify, which has no mAP",
        ),
        (["run", "fake:n", "--backend", "fake", "--device", "cpu:0"], "cpu:0 alone is not a device: write cpu, or"),
        (["run", "fake:n", "--backend", "fake", "--device", "gpu"], "unknown device 'gpu'; write cpu, or cuda:0"),
        (["run", "fake:n", "--backend", "fake", "--reference", "openvino"], "no trial fits the reference"),
        (["run", "--model", "fake:n"], "no such option: --model; give the model alone: dyno run torchvision:resnet18"),
        (["help"], "there is no command 'help'; write dyno --help"),
        (["run", "fake:n", "--rounds", "0"], "rounds is 0; it must be at least 1"),
        (["run", "fake:n", "--backend", "fake", "--data", "nowhere"], "no data folder "),
        (["run", "fake:n", "--python", "fake"], "--python 'fake' is not BACKEND=PATH"),
        (["run", "fake:n", "--python", "fake=/no/python"], "no Python interpreter at /no/python; correct the path"),
        (["run", "a.toml", "b.toml"], "give either one study file or models, not a.toml and 1 more"),
        (["run", "fake:n", "--weights", "none.pt"], "there is no weights file none.pt"),
        (["run", "fake:n", "--weights", ""], "--weights is empty, perhaps for a variable that is not set"),
        (["run", "fake:n", "--data="], "--data is empty, "),
        (["show", ""], "an argument is empty, "),
        (["show", "nowhere"], ""),
        (["report", "nowhere"], ""),
        (["report", "nowhere", "-o", "page.html"], "--out page.html is the folder for the page, its charts and tables"),
        (["export", "fake:n"], "give the file to write fake:n to: -o FILE, which ends in .onnx, "),
        (["export", "fake:n", "-o", "m.onnx", "--max", "8"], "--max is not for .onnx files; omit it"),
        (["export", "fake:n", "-o", "m.xml", "--opset", "18"], "--opset is not for .xml files; omit it"),
        (["export", "fake:n", "-o", "m.engine", "--batch", "dynamic"], "a dynamic engine needs --max, its largest"),
        (["export", "fake:n", "-o", "m.onnx", "--shape", "1,3,224"], "shape '1,3,224' is not four numbers N,C,H,W"),
        (["export", "fake:n", "-o", "m.onnx", "--target", "openvno"], "unknown target 'openvno'"),
        (["export", "none.onnx", "-o", "m.xml"], "there is no model file none.onnx"),
        (["export", "none.onnx", "-o", "m.exe"], "export writes .onnx, "),
        (["export", "none.onnx", "-o", "m.engine", "--backend", "openvino"], "openvino doesn't build .engine files"),
        (["export", "none.onnx", "-o", "m.xml", "--min", "1"], "a dynamic engine needs --max"),
        (["export", "none.onnx", "-o", "m.engine", "--opt", "4", "--max", "2"], "--min, --opt and --max are 1, 4"),
        (["export", "none.onnx", "-o", "m.xml", "--precision", "fp16"], "openvino chooses fp16 when it runs a file"),
        (
            ["export", "fake:n", "-o", "m.onnx", "--size", "8", "--shape", "1,3,8,8"],
            "--shapes N,C,H,W and --size both set",
        ),
        (["export", "fake:n", "-o", "m.onnx", "--size", "8,16"], "a file is for one image size, not for 8, 16"),
        (["export", "none.onnx", "-o", "m.xml", "--max", "4", "--shapes", "x:1x3"], "--shapes and --min, --opt, --max"),
        (["export", "none.onnx", "-o", "m.xml", "--option", "sreams=1"], "unknown option 'sreams' of openvino"),
        (["export", "none.onnx", "-o", "m.xml", "--repeat", "2"], "openvino makes the same file every time"),
        (["time", "fake:net", "--trtexec", "nope.log"], "nope.log can't be read"),
        (["time", "none.onnx"], "there is no model file none.onnx"),
        (["diff", "none.onnx", "none.xml"], "there is no model file none.onnx"),
        (["eval", "none.onnx", "--data", "d"], "there is no model file none.onnx"),
        (["doctor", "--format", "yaml"], "unknown format 'yaml'; known: text, markdown, csv, json, html"),
        (["doctor", "--python", "x"], "--python 'x' is not BACKEND=PATH"),
    ],
)
def test_bad_words(refused: Any, words: list[str], line: str) -> None:
    assert refused(*words).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("models = ['fake:n']\nbackend = ['fake']", "unknown key 'backend' in s.toml; did you mean 'backends'?"),
        ("models = ['fake:n'\n", "s.toml is not valid TOML: "),
        ("rounds = 3", "s.toml names no models; write models = "),
        ("models = ['fake:n']\nrounds = 'three'", "s.toml: rounds is 'three'; it must be a whole number"),
        ("models = ['fake:n']\nbackends = ['fake@runtime=old']", "backend 'fake' asks for runtime 'old', which"),
        (
            "models = ['fake:n']\n[runtime]\nfake = '/usr/bin/python3'",
            "s.toml: runtime is {'fake': '/usr/bin/python3'}",
        ),
    ],
)
def test_bad_study_files(refused: Any, tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "s.toml").write_text(text)
    assert refused("run", "s.toml").startswith(line)
