"""Arguments of the commands of `launch.py`. No torch."""

from __future__ import annotations

import argparse
from typing import Any

from engine.config.export_choice import EXPORT_FROM
from engine.config.optimizers import OPTIMIZERS
from engine.config.output_settings import TRACKERS
from engine.tools.cli import argument_types


def runs_dir_argument(command: argparse.ArgumentParser) -> None:
    """Adds the folder of runs. Where the option is not given after the command's name, the value
    given before it is kept.
    """
    command.add_argument(
        "--runs-dir",
        type=argument_types.path,
        default=argparse.SUPPRESS,
        help="where runs are kept",
    )


def address_arguments(command: argparse.ArgumentParser, is_command: bool) -> None:
    """Adds where the app listens, and whom it lets in. is_command: the options follow a command's
    name; what is not given there keeps the value given before it.
    """

    def default(value: Any) -> Any:
        return argparse.SUPPRESS if is_command else value

    command.add_argument(
        "--host",
        default=default("127.0.0.1"),
        help="address to listen on (a public one needs --login)",
    )
    command.add_argument("--port", type=argument_types.port, default=default(7860))
    command.add_argument(
        "--login",
        action="store_true",
        default=default(False),
        help="ask for a user name and password",
    )
    command.add_argument(
        "--no-login",
        action="store_true",
        default=default(False),
        help="let in whoever reaches the port, all other accounts of this machine included",
    )
    command.add_argument(
        "--tls-cert",
        type=argument_types.path,
        metavar="FILE",
        default=default(None),
        help="PEM certificate, to serve by https",
    )
    command.add_argument(
        "--tls-key",
        type=argument_types.path,
        metavar="FILE",
        default=default(None),
        help="its PEM key",
    )
    command.add_argument(
        "--proxy",
        action="append",
        default=default([]),
        metavar="ADDRESS",
        help="address or network of a reverse proxy, which tells where requests come from",
    )


def set_argument(command: argparse.ArgumentParser) -> None:
    """Adds the changes of single settings."""
    command.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", help="change one setting"
    )


def check_arguments(check: argparse.ArgumentParser) -> None:
    """Adds the arguments of `check`."""
    check.add_argument("preset", nargs="?", type=argument_types.preset, help="YAML preset")
    check.add_argument("--model", metavar="ID_OR_FOLDER", help="a model instead of a preset")
    set_argument(check)
    check.add_argument(
        "--machine",
        action="append",
        default=[],
        metavar="NAME",
        help="a known machine instead of this one; with --table, beside it, and more than once",
    )
    check.add_argument(
        "--table", action="store_true", help="every model of the catalog on this and other machines"
    )
    check.add_argument(
        "--csv", action="store_true", help="the table as CSV, with all known machines"
    )
    check.add_argument(
        "--optimizer",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)} (that of the settings by default); in a table, best is the "
        "first AdamW that fits, cell by cell",
    )
    check.add_argument(
        "--method",
        choices=("full", "lora"),
        help="all weights or adapters (LoRA) are trained (train.method)",
    )
    check.add_argument(
        "--gpus",
        type=argument_types.gpus,
        metavar="N",
        help="GPUs that compute each step together (engine.gpus), or auto; a known machine then "
        "has so many",
    )
    check.add_argument(
        "--nodes",
        type=argument_types.nodes,
        default=1,
        metavar="N",
        help="so many nodes like the machine compute the job together",
    )
    check.add_argument(
        "--network-gbits",
        type=argument_types.rate,
        metavar="G",
        help="the network brings so many Gbit/s to each node (measured, or else 100, by default)",
    )
    check.add_argument("--ram-gib", type=float, help="RAM of the machine")
    check.add_argument("--gpu-gib", type=float, help="GPU memory of the machine")
    check.add_argument("--disk-gib", type=float, help="free disk of the machine")
    runs_dir_argument(check)
    check.add_argument("--json", action="store_true")


def track_arguments(track: argparse.ArgumentParser) -> None:
    """Adds the arguments of `track`."""
    track.add_argument("run_id")
    track.add_argument(
        "--to",
        action="append",
        default=[],
        choices=TRACKERS,
        help="a tracker, more than once for several (output.trackers of the run by default)",
    )
    runs_dir_argument(track)


def trace_arguments(trace: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trace`."""
    trace.add_argument("run_id")
    trace.add_argument(
        "--step", type=int, metavar="N", help="a step that was sampled (the latest by default)"
    )
    trace.add_argument(
        "--out",
        type=argument_types.path,
        metavar="FILE",
        help="where to (a file named after run and step by default)",
    )
    runs_dir_argument(trace)


def eval_arguments(evaluate: argparse.ArgumentParser) -> None:
    """Adds the arguments of `eval`."""
    evaluate.add_argument("run_id")
    evaluate.add_argument(
        "--validation",
        action="store_true",
        help="the loss of the run's validation rows, and which of its validation prompts are "
        "answered right (by default, where nothing else is asked)",
    )
    evaluate.add_argument(
        "--prompts",
        type=argument_types.samples,
        default=200,
        metavar="N",
        help="answer at most so many validation prompts for --validation (200 by default)",
    )
    evaluate.add_argument(
        "--answers",
        type=argument_types.samples,
        default=0,
        metavar="N",
        help="show the answers to so many validation prompts side by side",
    )
    evaluate.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="names of tasks or groups of lm-evaluation-harness, such as arc_easy",
    )
    evaluate.add_argument(
        "--no-base",
        action="store_true",
        help="leave out the base model, which is evaluated beside the trained one",
    )
    evaluate.add_argument(
        "--include",
        type=argument_types.path,
        metavar="FOLDER",
        help="a folder of YAML files with tasks of your own",
    )
    evaluate.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="run the Python that tasks of --include name (asked for at a terminal)",
    )
    evaluate.add_argument(
        "--limit",
        type=argument_types.samples,
        metavar="N",
        help="ask at most so many samples of a task (all by default)",
    )
    evaluate.add_argument(
        "--shots",
        type=argument_types.shots,
        metavar="N",
        help="solved examples before each question (as the task says by default)",
    )
    evaluate.add_argument(
        "--chat", action="store_true", help="write questions with the model's chat template"
    )
    evaluate.add_argument(
        "--of",
        choices=EXPORT_FROM,
        help="the best weights or the last (by default the run's export, or what it would take)",
    )
    evaluate.add_argument(
        "--max-tokens",
        type=argument_types.tokens,
        metavar="N",
        help="cut longer rows to so many tokens (the model's longest row by default)",
    )
    runs_dir_argument(evaluate)
    evaluate.add_argument("--json", action="store_true")


def bench_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench`."""
    bench.add_argument(
        "preset",
        nargs="?",
        type=argument_types.preset,
        help="YAML preset, trained from random weights on random tokens",
    )
    set_argument(bench)
    bench.add_argument(
        "--sampling",
        type=argument_types.answers_to_sample,
        metavar="PxAxT",
        help="draw A answers of T tokens to each of P random prompts instead of training, such as "
        "64x8x256",
    )
    bench.add_argument(
        "--then",
        action="append",
        default=[],
        metavar='"a.b=v c.d=w"',
        help="and once more with these settings changed, on the same weights",
    )
    bench.add_argument(
        "--seconds",
        type=argument_types.seconds,
        default=60.0,
        help="that each training runs, or up to twice as many until two steps in a row agree "
        "within 3 %%, which ends the warm-up",
    )
    bench.add_argument(
        "--steps",
        type=argument_types.steps,
        metavar="N",
        help="each training has at least N steps (4 by default; 2 where one is predicted to take "
        "more than a minute); a single one is measured without a warm-up",
    )
    bench.add_argument(
        "--streamed-only",
        action="store_true",
        help="do not train with all states on the device beside it",
    )
    bench.add_argument(
        "--evaluation",
        type=argument_types.rows,
        default=0,
        metavar="ROWS",
        help="after each training, also time an evaluation of so many rows, and its kernels alone",
    )
    bench.add_argument(
        "--disk",
        metavar="FOLDER",
        help="measure the disk of engine.disk alone; it writes 68 GB to FOLDER",
    )
    bench.add_argument("--json", action="store_true")
