"""`--schema`: the JSON Schema of a command's JSON. The fixtures `call` and `dyno` validate all printed JSON."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dyno.cli import app, schemas

GOLDEN = Path(__file__).parents[1] / "golden" / "run"


def list_commands() -> list[str]:
    every = {name: at for commands in app.COMMANDS.values() for name, at in commands.items()}
    return [f"{group} {name}" for group, at in every.items() if isinstance(at, dict) for name in at] + [
        name for name, at in every.items() if isinstance(at, str)
    ]


def test_each_command_with_json_has_a_schema(call: Any, refused: Any) -> None:
    without = {"report", "demo", "runs rm", "data imagenet-val", "site"}
    for command in list_commands():
        if command in without:
            assert refused(*command.split(), "--schema").startswith("no such option: --schema")
            continue
        schema = json.loads(call(*command.split(), "--schema", code=0)[1])
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["title"] == f"dyno {command} --format json"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"another": 1}, schema)


def test_json_output_matches_its_schema(call: Any, tmp_path: Path) -> None:
    for words in (("show", GOLDEN), ("show", GOLDEN, "--table", "all"), ("show", "--list"), ("runs", "list", tmp_path)):
        call(*words, "--format", "json", code=0)
    document = json.loads(call("show", GOLDEN, "--format", "json", code=0)[1])
    schema = schemas.describe_command("show")
    trials = document["tables"]["trials"]
    for name, wrong in (
        ("decisions", "none"),
        ("tables", {"trials": {**trials, "rows": [{"latency_ms": "fast"}]}}),
        ("tables", {"trials": {**trials, "rows": [{"unknown": 1}]}}),
        ("tables", {"unknown": trials}),
        ("rows", trials["rows"]),  # without the table's name
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, name: wrong}, schema)


def test_pack_and_verify_report_as_json(call: Any, refused: Any, tmp_path: Path) -> None:
    pack = tmp_path / "golden.pack.zip"
    written = json.loads(call("pack", GOLDEN, "-o", pack, "--card", "--format", "json", code=0)[1])
    assert [Path(file).exists() for file in written["files"]] == [True] * 3 and written["files"][0] == str(pack)
    assert json.loads(call("verify", pack, "--format", "json", code=0)[1])["verified"] is True
    assert refused("verify", pack, "--format", "csv") == "unknown format 'csv'; known: text, json"
