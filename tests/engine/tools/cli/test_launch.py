"""The command line: exit codes, plain sentences, and every command on real input."""

from __future__ import annotations

import errno
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
from app.server.address import Address, plain_host
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.record.run_folder import create_run
from engine.runs.record.runs_root import refuse_unusable
from engine.runs.summaries.listing import list_runs
from tests.support.bad_commands import bad
from tests.support.data_tokenizers import NO_END
from tests.support.disks import small_file_system
from tests.support.folders import make_config, make_data, make_model, make_tokenizer
from tests.support.forked_processes import ForkedProcess
from tests.support.ports import free_port

ROOT = Path(launch.__file__).parent


@pytest.fixture
def preset(tmp_path):
    config = make_config(tmp_path)
    path = tmp_path / "preset.yaml"
    config.save(path)
    return path


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
    assert "give the same tokens as in training" in capsys.readouterr().err
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
    assert code == 2
    assert setting.split("=")[1] in printed.err
    assert "Traceback" not in printed.out + printed.err


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


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
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
    assert process.returncode == 0
    assert "Stopped and saved at step" in output
    assert "--resume" in output
    run = list_runs(runs)[0]
    assert run.state == "stopped" and run.step > 3
    # The command was started in the plain way before, so this one need not import all anew.
    resumed = ForkedProcess(
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
    "rows, text",
    [
        ("", "is empty"),
        ('{"messages": [', "is cut off in line 1"),
        ('{"prompt": "a", "completion": ""}\n', "no token to train on"),
        (None, "There is no file"),
    ],
)
def test_check_refuses_data_that_cannot_be_trained_on(capsys, tmp_path, rows, text):
    path = tmp_path / "rows.jsonl"
    if rows is not None:
        path.write_text(rows, encoding="utf-8")
    preset = str(PROGRAM_ROOT / "presets/starter.yaml")
    assert launch.main(["check", preset, "--set", f"data.source={path}"]) == 2
    found = capsys.readouterr()
    assert text in found.err
    assert found.err.count("\n") == 1
    assert not found.out


def test_check_warns_of_answers_that_end_with_no_token(capsys, tmp_path):
    model = make_model(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = NO_END
    tokenizer.save_pretrained(model)
    data = make_data(tmp_path / "data.jsonl")
    preset = str(PROGRAM_ROOT / "presets/starter.yaml")
    other = [f"model.source={model}", f"data.source={data}"]
    assert launch.main(["check", preset, *(f"--set={each}" for each in other)]) == 0
    found = capsys.readouterr().out
    assert "\nWarning: The chat template ends an answer with no token, so the model cannot" in found
    assert (
        "where to stop (40 answers); use a model whose chat template ends an answer with" in found
    )


def test_check_says_how_much_of_the_data_is_trained(capsys):
    preset = str(PROGRAM_ROOT / "presets/starter.yaml")
    assert launch.main(["check", preset]) == 0
    found = capsys.readouterr().out
    assert "Data: 42.1 % of the tokens of the first 200 rows" in found
    assert " An answer ends with <|end|>." in found
    does_not_fit = 1  # on a machine with little free memory, which is not asked here
    other = ["check", preset, "--set", "model.source=Qwen/Qwen2.5-0.5B"]
    assert launch.main(other) in (0, does_not_fit)
    assert "once the tokenizer of Qwen/Qwen2.5-0.5B is" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["99999", "-1", "0", "abc", "", "²"])
def test_a_port_that_cannot_be_is_refused_in_one_sentence(capsys, port):
    with pytest.raises(SystemExit) as ended:
        launch.main([f"--port={port}"])
    found = capsys.readouterr().err
    assert ended.value.code == 2 and found.count("\n") == 1
    assert f"there is no port {port}; choose 1 to 65535" in found


@pytest.mark.parametrize(
    "host, reported",
    [
        ("300.1.1.1", "this is no IP address"),
        ("::1::2", "this is no IP address"),
        ("no such host", "no machine of this name"),
        ("x" * 300, "no machine of this name"),
        ("nowhere.invalid", "no machine of this name"),
        ("192.0.2.1", "this is no address of this machine"),
        ("2001:db8::1", "this is no address of this machine"),
        ("localhost:7860", "a port is given by --port 7860"),
        ("http://localhost", "give the address alone, without http:// or a path"),
    ],
)
def test_a_host_that_cannot_be_is_blamed_itself(capsys, tmp_path, host, reported):
    arguments = [f"--host={host}", "--port=7861", f"--runs-dir={tmp_path}", "--no-browser"]
    sentence = bad(capsys, *arguments)
    assert sentence.startswith(f"ramstream: --host {host}: {reported}") and "7861" not in sentence
    assert "leave --host out to listen on 127.0.0.1" in sentence


@pytest.mark.parametrize("host", ["", " ", "a\nb"])
def test_a_host_that_is_no_text_is_told_in_one_line(capsys, host):
    assert bad(capsys, f"--host={host}").startswith("ramstream: --host")


def test_an_address_of_ip_version_6_may_have_brackets():
    assert Address(plain_host("[::1]"), 80).url == "http://[::1]:80/"
    assert Address(plain_host("::1"), 80).url == "http://[::1]:80/"


def test_a_port_of_the_system_is_blamed_itself(capsys, monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert bad(capsys, "--port=80", f"--runs-dir={tmp_path}") == (
        "ramstream: --port 80: this user may not use it; choose one from 1024 on."
    )


@pytest.mark.parametrize(
    "runs, reported",
    [
        ("{file}", "this is not a folder; name another one."),
        ("{file}/runs", "{file} is not a folder; name another one."),
        ("/proc/runs", "nothing can be written in /proc"),
        ("{folder}/" + "x" * 300, "(File name too long); name another"),
        ("~nosuchuser/runs", "(Could not determine home directory); name another"),
        ("", "no path is given"),
    ],
)
def test_a_folder_that_cannot_hold_runs_is_refused_before_the_server_is_up(
    capsys, tmp_path, monkeypatch, runs, reported
):
    monkeypatch.setattr("app.main.build_app", lambda *_, **__: pytest.fail("it was built"))
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    names = {"file": file, "folder": tmp_path}
    sentence = bad(capsys, f"--runs-dir={runs.format(**names)}", f"--port={free_port()}")
    assert reported.format(**names) in sentence and "--runs-dir" in sentence


def test_a_disk_that_is_full_or_only_read_is_refused(capsys, tmp_path):
    with small_file_system(tmp_path / "disk", 1) as disk:
        (disk / "filling").write_bytes(bytes((1 << 20) - (8 << 10)))
        arguments = (f"--runs-dir={disk / 'runs'}", f"--port={free_port()}")
        assert "the disk is full; free some space" in bad(capsys, *arguments)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert f"{disk} is on a disk that can only be read" in bad(capsys, *arguments)
        assert {path.name for path in disk.iterdir()} == {"filling"}


def test_a_folder_for_runs_that_will_do_is_left_as_it_is(tmp_path):
    refuse_unusable(tmp_path / "a" / "b")
    refuse_unusable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_said_before_anything_is_built(capsys, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert launch.main([f"--port={port}", f"--runs-dir={tmp_path / 'runs'}"]) == 2
    found = capsys.readouterr().err
    assert found == (
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


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
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


def in_shell(command: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a command of a shell in which $RAMSTREAM is this program."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=PROGRAM_ROOT,
        env=os.environ | {"RAMSTREAM": f"{sys.executable} launch.py"} | variables,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "command, code, reported",
    [
        ("$RAMSTREAM runs >/dev/full", 1, "The output cannot be written (No space left on device)"),
        ("$RAMSTREAM --help >/dev/full", 1, "The output cannot be written (No space left on"),
        ("$RAMSTREAM check --table --csv >/dev/full", 1, "The output cannot be written (No space"),
        ("$RAMSTREAM runs >&-", 0, ""),
        ("$RAMSTREAM runs <&- >&- 2>&-", 0, ""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 $RAMSTREAM runs", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_ends_in_a_sentence(tmp_path, command, code, reported):
    create_run(
        tmp_path,
        TrainConfig.from_dict({"name": "→", "model": {"source": "m"}, "data": {"source": "d"}}),
    )
    done = in_shell(command.replace(" runs", f" runs --runs-dir {tmp_path}"))
    assert (done.returncode, bool(done.stderr)) == (code, bool(reported)), done.stderr
    assert reported in done.stderr and done.stderr.count("\n") == bool(reported)


def test_sentences_name_the_command_that_was_called(capsys, monkeypatch, tmp_path):
    for started, named in {
        "/usr/bin/ramstream": "`ramstream runs`",
        "launch.py": "`python launch.py runs`",
        "../my program/launch.py": "`python '../my program/launch.py' runs`",
        "/usr/bin/pytest": "`python launch.py runs`",
    }.items():
        monkeypatch.setattr(sys, "argv", [started])
        assert named in bad(capsys, "export", "none", str(tmp_path / "x"))
        assert named in bad(capsys, "serve", "none")


def test_a_preset_of_the_program_is_found_from_any_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert launch.main(["check", "presets/starter.yaml"]) == 0
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "starter.yaml").write_text("trane: 1\n", encoding="utf-8")
    capsys.readouterr()
    assert "trane" in bad(capsys, "check", "presets/starter.yaml")


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "1e9", "soon"])
def test_a_time_that_cannot_be_is_refused(capsys, seconds):
    assert f"'{seconds}' is no time" in bad(capsys, "bench", f"--seconds={seconds}")


def test_an_empty_model_is_no_model(capsys):
    assert "no model is given" in bad(capsys, "check", "--model", "")
