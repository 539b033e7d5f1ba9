"""The images that the Dockerfile makes, and how compose.yaml starts them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml

from engine.paths import PROGRAM_ROOT
from engine.runs.record.run_folder import RunFolder
from engine.training.checkpoints.saved_on_disk import saved_steps

IMAGE = "ramstream:test"
NEEDED = ("buildah", "debootstrap")


def test_what_an_image_is_built_from_is_sent_to_the_builder():
    lines = (PROGRAM_ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"  # what is not named stays here: runs, environments, keys
    for name in sent:
        assert (PROGRAM_ROOT / name).exists(), name
    packed = ("app", "assets", "engine", "presets", "launch.py", "pyproject.toml", "README.md")
    assert {*packed, "LICENSE"} <= sent


def test_compose_starts_the_images_and_gives_a_run_time_to_save():
    dockerfile = (PROGRAM_ROOT / "Dockerfile").read_text(encoding="utf-8")
    targets = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)
    services = yaml.safe_load((PROGRAM_ROOT / "compose.yaml").read_text(encoding="utf-8"))
    for service in services["services"].values():
        assert service["build"]["target"] in targets
        assert service["stop_signal"] == "SIGTERM" and service["stop_grace_period"] == "15m"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.slow("it builds an image, for five minutes or more")
@pytest.mark.skipif(
    os.getuid() != 0 or any(shutil.which(name) is None for name in NEEDED),
    reason="root, buildah and debootstrap build it",
)
@pytest.mark.timeout(1800)
def test_the_image_for_the_cpu_trains_and_saves_at_sigterm(tmp_path):
    base = tmp_path / "base"
    asked("debootstrap", "--variant=minbase", "bookworm", base)
    made = asked("buildah", "from", "scratch")
    asked("buildah", "add", "--quiet", made, base, "/")
    asked("buildah", "commit", "--quiet", "--rm", made, "localhost/ramstream-base")
    asked(
        *("buildah", "build", "--isolation", "chroot", "--target", "cpu", "--tag", IMAGE),
        *("--build-arg", "BASE=localhost/ramstream-base", *further_options()),
        PROGRAM_ROOT,
    )
    container = asked("buildah", "from", IMAGE)
    try:
        run = ("buildah", "run", "--isolation", "chroot", container, "--", "ramstream")
        assert asked(*run, "--version").startswith("ramstream ")
        volume = tmp_path / "volume"
        volume.mkdir()
        os.chown(volume, 1000, 1000)
        at = run.index(container)
        stays = (*run[:at], "--volume", f"{volume}:/ramstream", *run[at:])
        training = subprocess.Popen([*stays, "train", "presets/starter.yaml"])
        wait_for_step(volume / "runs")
        for process in psutil.Process(training.pid).children(recursive=True):
            if "train" in process.cmdline() and process.name() == "ramstream":
                os.kill(process.pid, signal.SIGTERM)
        training.wait(60)
        (folder,) = [RunFolder(path) for path in (volume / "runs").iterdir()]
        assert saved_steps(folder.checkpoints_path).full
    finally:
        asked("buildah", "rm", container)


def further_options() -> list[str]:
    """Returns the options that a build needs where packages come from a mirror: its folders, and
    settings of pip that name it.
    """
    return shlex.split(os.environ.get("RAMSTREAM_BUILD_OPTIONS", ""))


def asked(*command: str | Path) -> str:
    """Returns what a command prints."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.strip()


def wait_for_step(runs: Path) -> None:
    """Waits until a run has computed some steps."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        for events in runs.glob("*/events.jsonl"):
            if events.read_text(encoding="utf-8").count('"step_finished"') >= 3:
                return
        time.sleep(0.2)
    raise AssertionError("no step was computed")
