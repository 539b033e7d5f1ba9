"""The command line: exit codes, plain sentences, and every command on real input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.folder import create_run
from engine.runs.listing import list_runs
from tests.support.folders import make_config

ROOT = Path(launch.__file__).parent


@pytest.fixture
def preset(tmp_path):
    config = make_config(tmp_path)
    path = tmp_path / "preset.yaml"
    config.save(path)
    return path


def bad(capsys, *arguments: str) -> str:
    """Run a command that must fail with exit code 2, and return its one sentence."""
    try:
        code = launch.main(list(arguments))
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2, captured
    sentence = captured.err.strip()
    assert (
        sentence.startswith("ramstream: ") and "\n" not in sentence and "Traceback" not in sentence
    )
    return sentence


def test_bad_input_ends_with_one_sentence(capsys, tmp_path, preset):
    assert "no such preset" in bad(capsys, "train", str(tmp_path / "none.yaml"))
    assert "invalid choice" in bad(capsys, "fly")
    assert "no preset" in bad(capsys, "train")
    assert "train.learning_rat" in bad(
        capsys, "train", str(preset), "--set", "train.learning_rat=1"
    )
    assert "train.steps" in bad(capsys, "train", str(preset), "--set", "train.steps=many")
    assert "section.field=value" in bad(capsys, "train", str(preset), "--set", "steps")
    assert "keeps its own settings" in bad(capsys, "train", str(preset), "--resume", "x")
    assert "x" in bad(capsys, "train", "--resume", "x", "--runs-dir", str(tmp_path))
    assert "nope" in bad(
        capsys, "export", "nope", str(tmp_path / "out"), "--runs-dir", str(tmp_path)
    )
    assert "model.source" in bad(capsys, "check", "--model", str(tmp_path / "nowhere"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("train: [unclosed", encoding="utf-8")
    assert "not valid YAML" in bad(capsys, "train", str(broken))
    twice = tmp_path / "twice.yaml"
    twice.write_text("train: {steps: 2}\ntrain: {batch_size: 4}", encoding="utf-8")
    assert "train: this is given twice" in bad(capsys, "train", str(twice))
    assert "There is no file /nope.jsonl" in bad(
        capsys, "check", str(preset), "--set", "data.source=/nope.jsonl"
    )
    assert not (tmp_path / "runs").exists(), "a preset that does not load leaves no run behind"


def test_train_runs_and_export(capsys, tmp_path, preset):
    runs = tmp_path / "runs"
    assert (
        launch.main(["train", str(preset), "--runs-dir", str(runs), "--set", "train.steps=3"]) == 0
    )
    printed = capsys.readouterr()
    assert "Finished all 3 steps." in printed.out and "examples as messages" in printed.out
    assert launch.main(["runs", "--runs-dir", str(runs), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["state"], run["step"], run["name"]) == ("finished", 3, "Tiny")
    assert launch.main(["runs", "--runs-dir", str(runs)]) == 0
    assert run["id"] in capsys.readouterr().out
    assert launch.main(["export", run["id"], str(tmp_path / "home"), "--runs-dir", str(runs)]) == 0
    assert (tmp_path / "home" / "model.safetensors").exists()
    assert "not an empty folder" in bad(
        capsys, "export", run["id"], str(tmp_path / "home"), "--runs-dir", str(runs)
    )
    assert "has no checkpoint of step 9" in bad(
        capsys,
        "export",
        run["id"],
        str(tmp_path / "away"),
        "--runs-dir",
        str(runs),
        "--checkpoint",
        "9",
    )


@pytest.mark.parametrize(
    "setting", ["data.source=missing.jsonl", "model.source=/no/such/folder", "engine.rounds=3"]
)
def test_bad_input_that_only_preparing_finds_exits_with_2_and_its_reason(
    capsys, tmp_path, preset, setting
):
    code = launch.main(
        ["train", str(preset), "--runs-dir", str(tmp_path / "runs"), "--set", setting]
    )
    printed = capsys.readouterr()
    assert (
        code == 2
        and setting.split("=")[1] in printed.err
        and "Traceback" not in printed.out + printed.err
    )


def test_a_run_that_fails_on_its_way_exits_with_1(capsys, tmp_path, preset):
    code = launch.main(
        [
            "train",
            str(preset),
            "--runs-dir",
            str(tmp_path / "runs"),
            "--set",
            "train.learning_rate=1e30",
            "--set",
            "train.max_grad_norm=null",
        ]
    )
    assert code == 1 and "is not a finite number" in capsys.readouterr().err


def test_a_finished_run_is_not_resumed_and_stays_finished(capsys, tmp_path, preset):
    runs = tmp_path / "runs"
    assert (
        launch.main(["--runs-dir", str(runs), "train", str(preset), "--set", "train.steps=2"]) == 0
    )
    run = list_runs(runs)[0]
    record = (runs / run.id / "events.jsonl").read_bytes()
    capsys.readouterr()
    assert "has finished all its 2 steps" in bad(
        capsys, "--runs-dir", str(runs), "train", "--resume", run.id
    )
    assert (runs / run.id / "events.jsonl").read_bytes() == record


def test_ctrl_c_stops_and_saves_and_resume_finishes(tmp_path, preset):
    runs = tmp_path / "runs"
    command = [sys.executable, str(ROOT / "launch.py"), "train", "--runs-dir", str(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(preset), "--set", "train.steps=100000", "--set", "train.schedule=constant"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (
        runs.exists() and list_runs(runs) and list_runs(runs)[0].step > 3
    ):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (
        process.returncode == 0 and "Stopped and saved at step" in output and "--resume" in output
    )
    run = list_runs(runs)[0]
    assert run.state == "stopped" and run.step > 3
    resumed = subprocess.Popen(
        [*command, "--resume", run.id],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    while time.monotonic() < deadline and list_runs(runs)[0].step <= run.step:
        time.sleep(0.2)
    resumed.send_signal(signal.SIGTERM)
    output, _ = resumed.communicate(timeout=60)
    assert f"resumed at step {run.step}" in output
    assert list_runs(runs)[0].step > run.step


def test_check_reports_and_judges(capsys, preset):
    assert launch.main(["check", str(preset), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "fits" and {"host", "disk"} <= set(report)
    assert launch.main(["check", str(preset), "--ram-gib", "0.01"]) == 1
    assert "does not fit" in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    "rows, said",
    [
        ("", "is empty"),
        ('{"messages": [', "is not valid JSON"),
        ('{"prompt": "a", "completion": ""}\n', "no token to train on"),
        (None, "There is no file"),
    ],
)
def test_check_refuses_data_that_cannot_be_trained_on(capsys, tmp_path, rows, said):
    path = tmp_path / "rows.jsonl"
    if rows is not None:
        path.write_text(rows, encoding="utf-8")
    preset = str(PROGRAM_ROOT / "presets/starter.yaml")
    assert launch.main(["check", preset, "--set", f"data.source={path}"]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out


def test_check_says_how_much_of_the_data_is_trained(capsys):
    preset = str(PROGRAM_ROOT / "presets/starter.yaml")
    assert launch.main(["check", preset]) == 0
    assert "Data: 42.1 % of the tokens of the first 200 rows" in capsys.readouterr().out
    assert launch.main(["check", preset, "--set", "model.source=Qwen/Qwen2.5-0.5B"]) == 0
    assert "once the tokenizer of Qwen/Qwen2.5-0.5B is" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["99999", "-1", "0", "abc", "", "²"])
def test_a_port_that_cannot_be_is_refused_in_one_sentence(capsys, port):
    with pytest.raises(SystemExit) as ended:
        launch.main([f"--port={port}"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1
    assert f"there is no port {port}; choose 1 to 65535" in told


@pytest.mark.parametrize("host", ["300.1.1.1", "no such host", "192.0.2.1", "x" * 300])
def test_a_host_that_cannot_be_is_blamed_itself(capsys, tmp_path, monkeypatch, host):
    monkeypatch.setenv("RAMSTREAM_LOGIN", "me:secret")  # as a public address needs
    arguments = [f"--host={host}", "--port=7861", f"--runs-dir={tmp_path}", "--no-browser"]
    assert launch.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"ramstream: --host {host}: ") and told.count("\n") == 1


def test_a_port_in_use_is_said_before_anything_is_built(capsys, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert launch.main([f"--port={port}", f"--runs-dir={tmp_path / 'runs'}"]) == 2
    told = capsys.readouterr().err
    assert told == (
        f"ramstream: --port {port}: another program uses it already; choose another port.\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_name_that_the_terminal_cannot_write_is_written_in_codes(tmp_path):
    config = TrainConfig.from_dict(
        {"name": "Größe →", "model": {"source": "m"}, "data": {"source": "d"}}
    )
    create_run(tmp_path, config)
    done = subprocess.run(
        [sys.executable, "launch.py", "runs", "--runs-dir", str(tmp_path)],
        cwd=PROGRAM_ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Gr\\xf6\\xdfe \\u2192" in done.stdout


def test_a_reader_that_has_enough_ends_a_command_without_a_word():
    command = subprocess.Popen(
        [sys.executable, "launch.py", "check", "--table", "--csv"],
        cwd=PROGRAM_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout.readline().startswith("model")
    command.stdout.close()
    assert command.stderr.read() == ""
    assert command.wait() == 1
