"""Ramstream starts here, as the app (without arguments) or as a command in a terminal.

    ramstream                     the app, on http://127.0.0.1:7860
    ramstream train PRESET.yaml   train without a browser
    ramstream check PRESET.yaml   whether it fits this machine; without a preset: what fits
    ramstream export RUN_ID DIR   the trained model as a Hugging Face folder
    ramstream serve RUN           the trained model for any OpenAI client
    ramstream push FOLDER REPO    an exported model to the Hugging Face hub
    ramstream runs                all runs and their states
    ramstream link                a link that lets another browser into the app, once
    ramstream track RUN_ID        a run's curves for TensorBoard and other trackers
    ramstream trace RUN_ID        a step's timeline as a file for Perfetto
    ramstream eval RUN_ID         the trained model beside its base model
    ramstream bench [PRESET.yaml] how fast this machine and the engine are
    ramstream doctor              what stops or slows training here, and what mends it

`python launch.py` does the same without installation. Bad input gives a sentence and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

# Installed, this file is `ramstream.launch`, and the packages that it imports lie beside it in the
# folder `ramstream`, so that site-packages has no `app` and no `engine`.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine.config.export_choice import (
    EXPORT_DTYPES,
    EXPORT_FORMS,
    EXPORT_FROM,
    GGUF,
    GGUF_TYPES,
    ExportChoice,
)
from engine.errors import ConfigError, HostMemoryError, RamstreamError
from engine.machine.primitive_cache import bound_kept_kernels
from engine.paths import program_command, program_version
from engine.tools.cli import argument_types, command_arguments
from engine.tools.cli.end_signals import EndSignals, Interrupted, interrupt
from engine.tools.cli.streams import OutputError, open_closed_streams, show, write_any_name

DEFAULT_RUNS = "runs"
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that is set in every process that torchrun starts."""


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and runs its command; returns the exit code."""
    # By default, torch's CPU threads spin while they wait for each other, and steps take ten times
    # as long when the machine has any other work. torch reads the variable when it is imported. A
    # user's own setting takes precedence.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    bound_kept_kernels()  # here, so that processes that this one starts have it too
    open_closed_streams()
    write_any_name()
    try:
        # Commands that clean up after themselves do so after each of the signals. Training and the
        # app stop and save instead.
        with EndSignals(interrupt):
            return _run(argv)
    except RamstreamError as error:
        print(f"ramstream: {error}", file=sys.stderr)
        return 1 if isinstance(error, HostMemoryError) else 2
    except (MemoryError, OSError, ImportError, RuntimeError, SystemError) as error:
        from engine.machine.short_memory import is_short_of_memory, memory_text, remedy

        if not is_short_of_memory(error):
            raise
        text = f"The host ran out of memory: {memory_text()}; {remedy()}."
        print(f"ramstream: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):  # the terminal may be closed
            text = "Interrupted; nothing was under way that could be saved."
            print(f"ramstream: {text}", file=sys.stderr)
        return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)
    except OutputError as error:
        if str(error):
            print(f"ramstream: {error}", file=sys.stderr)
        return 1


def _run(argv: list[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
        _refuse_little_memory(arguments.run)
        code: int = arguments.run(arguments)
        return code
    finally:
        show(end="")  # detects a closed pipe or a full disk here, not while Python exits


def _refuse_little_memory(run: Callable[[argparse.Namespace], int]) -> None:
    from engine.machine.short_memory import Work, refuse_little_memory

    if run in (_train, _bench):
        refuse_little_memory(Work.RUN)
    elif run in (_check, _export, _eval):
        refuse_little_memory(Work.COMMAND)
    elif run in (_app, _serve):
        refuse_little_memory(Work.APP)


# ---------------------------------------------------------------------- commands


def _app(arguments: argparse.Namespace) -> int:
    _serve_app(arguments, not arguments.no_browser)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from engine.paths import named_folder
    from engine.runs.summaries.names import run_named

    run_id = run_named(named_folder(os.fspath(arguments.runs_dir)), arguments.run_name)
    _serve_app(arguments, False, run_id)
    return 0


def _serve_app(
    arguments: argparse.Namespace, opens_browser: bool, served_run: str | None = None
) -> None:
    from app.gradio_stubs import leave_out_stubs

    leave_out_stubs()  # before anything imports Gradio
    from app.main import serve
    from app.server.address import Address, plain_host
    from app.session.data_in import DataOptions
    from app.session.uploads import UploadLimits

    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ConfigError("--tls-cert, --tls-key", "both files are needed to serve by https.")
    tls = None if arguments.tls_cert is None else (arguments.tls_cert, arguments.tls_key)
    if arguments.login and arguments.no_login:
        raise ConfigError(
            "--login, --no-login", "a login is asked for or not; leave one of the two out."
        )
    given = {"largest": arguments.upload_limit, "quota": arguments.upload_quota}
    limits = {name: size for name, size in given.items() if size is not None}
    # Where neither is asked for, the address decides.
    login = bool(arguments.login) if arguments.login or arguments.no_login else None
    serve(
        Address(plain_host(arguments.host), arguments.port, tls, tuple(arguments.proxy)),
        login=login,
        runs_dir=arguments.runs_dir,
        open_browser=opens_browser,
        data_options=DataOptions(UploadLimits(**limits), tuple(arguments.data_folder)),
        served_run=served_run,
    )


def _train(arguments: argparse.Namespace) -> int:
    from engine.tools.cli.train import TrainCommand, run_in_terminal

    if arguments.resume is not None and arguments.from_run is not None:
        raise ConfigError(
            "--resume, --from", "a run goes on or a new one starts from it; leave one of them out."
        )
    gpus = [] if arguments.gpus is None else [f"engine.gpus={arguments.gpus}"]
    command = TrainCommand(
        arguments.preset,
        [*arguments.set, *gpus],
        arguments.runs_dir,
        arguments.resume,
        arguments.from_run,
    )
    if TORCHRUN in os.environ:
        from engine.tools.cli.launched import train_launched

        return train_launched(command, arguments.gpus)
    return run_in_terminal(command)


def _check(arguments: argparse.Namespace) -> int:
    from engine.tools.cli.check import CheckedJob, NamedMachine, check, check_table

    gpus = arguments.gpus
    overrides = [*arguments.set, *([] if gpus is None else [f"engine.gpus={gpus}"])]
    asked = (arguments.optimizer, arguments.method)
    job = CheckedJob(arguments.preset, arguments.model, overrides, *asked)
    is_report = arguments.preset is not None or arguments.model is not None
    if (arguments.nodes > 1 or arguments.network_gbits is not None) and (
        arguments.table or not is_report
    ):
        raise ConfigError(
            "--nodes", "a report of one job has several nodes; name a preset or --model."
        )
    if arguments.table:
        form = "json" if arguments.json else "text"
        if arguments.csv:
            form = "csv"
        for text in check_table(job, arguments.runs_dir, arguments.machine, form):
            show(text)
        return 0
    if arguments.csv or len(arguments.machine) > 1:
        raise ConfigError(
            "--csv" if arguments.csv else "--machine",
            "a report has no such form; add --table for a table.",
        )
    machine = NamedMachine(
        name=arguments.machine[0] if arguments.machine else None,
        ram_gib=arguments.ram_gib,
        gpu_gib=arguments.gpu_gib,
        disk_gib=arguments.disk_gib,
        gpus=gpus if isinstance(gpus, int) else None,
        nodes=arguments.nodes,
        network_gbits=arguments.network_gbits,
    )
    text, code = check(job, machine, arguments.runs_dir, arguments.json)
    show(text)
    return code


def _export(arguments: argparse.Namespace) -> int:
    from engine.runs.record.run_folder import open_run
    from engine.training.export.export import export_run
    from engine.training.export.export_size import planned_export

    choice = ExportChoice(arguments.checkpoint, arguments.dtype, arguments.weights, arguments.form)
    run = open_run(arguments.runs_dir, arguments.run_id)
    planned = planned_export(run, Path(arguments.folder), choice)
    if planned is not None:
        show(planned.sentence)
    exported = export_run(arguments.runs_dir, arguments.run_id, arguments.folder, choice)
    for sentence in exported.notes:
        print(f"Note: {sentence}", file=sys.stderr)
    show(f"Exported the model of {exported.in_words} to {arguments.folder}")
    return 0


def _push(arguments: argparse.Namespace) -> int:
    from engine.tools.cli.push_folder import push_folder

    show(push_folder(arguments.folder, arguments.repository, arguments.public))
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from engine.tools.cli.runs import runs_as_text

    show(runs_as_text(arguments.runs_dir, arguments.json))
    return 0


def _link(arguments: argparse.Namespace) -> int:
    from app.server.links import LINK_SECONDS, new_link
    from engine.paths import named_folder

    show(new_link(named_folder(os.fspath(arguments.runs_dir)), arguments.port))
    print(
        f"It works once, within {LINK_SECONDS // 60} minutes, and lets a browser do all that you "
        "can do there.",
        file=sys.stderr,
    )
    return 0


def _track(arguments: argparse.Namespace) -> int:
    from engine.tools.cli.track import track

    return track(arguments.runs_dir, arguments.run_id, arguments.to)


def _trace(arguments: argparse.Namespace) -> int:
    from engine.runs.record.trace import write_trace

    path = write_trace(arguments.runs_dir, arguments.run_id, arguments.step, arguments.out)
    show(f"Wrote {path}: open it in ui.perfetto.dev or chrome://tracing")
    return 0


def _eval(given: argparse.Namespace) -> int:
    from engine.runs.summaries.evaluation_results import Wanted
    from engine.tools.cli.evaluate import evaluate
    from engine.tools.evaluate.evaluate_run import AskedEvaluation

    names = [name.strip() for text in given.tasks or () for name in text.split(",")]
    wanted = Wanted(
        validation=given.validation or (given.tasks is None and not given.answers),
        prompts=given.prompts,
        answers=given.answers,
        tasks=tuple(dict.fromkeys(name for name in names if name)),
        include="" if given.include is None else os.fspath(given.include),
        limit=given.limit,
        shots=given.shots,
        chat=given.chat,
        most_tokens=given.max_tokens,
        with_base=not given.no_base,
    )
    if given.tasks is not None and not wanted.tasks:
        raise ConfigError("--tasks", "no task is named.")
    asked = AskedEvaluation(wanted, given.of, given.confirm_run_unsafe_code)
    show(evaluate(given.runs_dir, given.run_id, asked, given.json))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.disk is not None:
        from engine.tools.bench.disk_bench import bench_disk

        show(bench_disk(arguments.disk, arguments.json, lambda text: print(text, file=sys.stderr)))
        return 0
    from engine.tools.bench.time_sampling import SamplingJob
    from engine.tools.cli.bench import Measuring, Trainings, bench

    trainings = Trainings(arguments.preset, arguments.set, arguments.then)
    how = Measuring(
        arguments.seconds,
        not arguments.streamed_only,
        arguments.evaluation,
        steps=arguments.steps,
        sampling=SamplingJob(*arguments.sampling) if arguments.sampling else None,
    )
    show(bench(trainings, how, arguments.json))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from engine.tools.cli.doctor import doctor

    text, code = doctor(arguments.runs_dir)
    show(text)
    return code


# ---------------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one sentence, as for all other bad input."""

    def error(self, message: str) -> NoReturn:
        print(f"ramstream: {message}; see {program_command()} --help.", file=sys.stderr)
        raise SystemExit(2)


class _ShowVersion(argparse.Action):
    """Looks the version up only where it is asked for, unlike argparse's own action."""

    def __call__(self, *_: object) -> NoReturn:
        show(f"ramstream {program_version()}")
        raise SystemExit(0)


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program_command(),
        description="Fine-tune large language models at full precision on one GPU, from host RAM. "
        "Without a command: the app.",
    )
    _app_arguments(parser)
    parser.add_argument("--version", nargs=0, action=_ShowVersion, help="show the version and exit")
    parser.set_defaults(run=_app)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)

    _train_arguments(commands)
    _check_arguments(commands)
    _export_arguments(commands)
    _serve_arguments(commands)
    _push_arguments(commands)
    _runs_arguments(commands)
    _link_arguments(commands)
    _track_arguments(commands)
    _trace_arguments(commands)
    _eval_arguments(commands)
    _bench_arguments(commands)
    _doctor_arguments(commands)
    return parser


def _train_arguments(commands: _Commands) -> None:
    train = commands.add_parser("train", help="train a preset without a browser")
    train.add_argument(
        "preset", nargs="?", type=argument_types.preset, help="YAML preset (not with --resume)"
    )
    command_arguments.set_argument(train)
    command_arguments.runs_dir_argument(train)
    train.add_argument(
        "--resume",
        metavar="RUN_ID",
        help="go on with an earlier run; --set changes some of its settings",
    )
    train.add_argument(
        "--from",
        dest="from_run",
        metavar="RUN_ID",
        help="start a new run from the weights of an earlier one, with its settings or, if one is "
        "given, those of the preset",
    )
    train.add_argument(
        "--gpus",
        type=argument_types.gpus,
        metavar="N",
        help="GPUs of this machine that compute each step together (engine.gpus), or auto",
    )
    train.set_defaults(run=_train)


def _check_arguments(commands: _Commands) -> None:
    check = commands.add_parser(
        "check",
        help="will it fit? host, GPU and disk, item by item; alone: what this machine can train",
    )
    command_arguments.check_arguments(check)
    check.set_defaults(run=_check)


def _export_arguments(commands: _Commands) -> None:
    export = commands.add_parser(
        "export", help="write a run's model as a Hugging Face folder or a GGUF file"
    )
    export.add_argument("run_id")
    export.add_argument("folder", type=argument_types.path)
    export.add_argument(
        "--checkpoint", type=int, metavar="N", help="the weights of step N, which has a checkpoint"
    )
    export.add_argument(
        "--weights",
        choices=EXPORT_FROM,
        help="the best that the run has kept, or the last (as output.export_from by default)",
    )
    export.add_argument(
        "--dtype",
        choices=tuple(dict.fromkeys((*EXPORT_DTYPES, *GGUF_TYPES))),
        default="auto",
        help="of the weights (the model's own by default; float32 has all of the masters; a GGUF "
        "file may also have float16 and q8_0)",
    )
    export.add_argument(
        "--form",
        choices=(*EXPORT_FORMS, GGUF),
        help="the whole model, the adapters alone (as output.export_form by default), or one GGUF "
        "file for llama.cpp, Ollama and LM Studio",
    )
    command_arguments.runs_dir_argument(export)
    export.set_defaults(run=_export)


def _serve_arguments(commands: _Commands) -> None:
    serve = commands.add_parser(
        "serve", help="answer OpenAI clients with a run's model, beside the app"
    )
    serve.add_argument("run_name", metavar="RUN", help="id or name of a run")
    command_arguments.address_arguments(serve, is_command=True)
    command_arguments.runs_dir_argument(serve)
    serve.set_defaults(run=_serve)


def _push_arguments(commands: _Commands) -> None:
    push = commands.add_parser("push", help="upload an exported model to the Hugging Face hub")
    push.add_argument("folder", type=argument_types.path)
    push.add_argument("repository", help="NAME or OWNER/NAME; it is made if it is missing")
    push.add_argument("--public", action="store_true", help="a new repository is seen by everyone")
    push.set_defaults(run=_push)


def _runs_arguments(commands: _Commands) -> None:
    runs = commands.add_parser("runs", help="list all runs")
    command_arguments.runs_dir_argument(runs)
    runs.add_argument("--json", action="store_true")
    runs.set_defaults(run=_runs)


def _link_arguments(commands: _Commands) -> None:
    link = commands.add_parser(
        "link", help="a link that lets another browser into the app that runs here, once"
    )
    command_arguments.runs_dir_argument(link)
    link.add_argument(
        "--port", type=argument_types.port, help="of the app, where several run with these runs"
    )
    link.set_defaults(run=_link)


def _track_arguments(commands: _Commands) -> None:
    track = commands.add_parser(
        "track", help="give the curves of a run that is over to TensorBoard and other trackers"
    )
    command_arguments.track_arguments(track)
    track.set_defaults(run=_track)


def _trace_arguments(commands: _Commands) -> None:
    trace = commands.add_parser(
        "trace", help="write the timeline of a sampled step as a file for Perfetto"
    )
    command_arguments.trace_arguments(trace)
    trace.set_defaults(run=_trace)


def _eval_arguments(commands: _Commands) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="the trained model beside its base model, on the run's validation rows and "
        "on tasks of lm-evaluation-harness",
    )
    command_arguments.eval_arguments(evaluate)
    evaluate.set_defaults(run=_eval)


def _bench_arguments(commands: _Commands) -> None:
    bench = commands.add_parser(
        "bench", help="ceilings of this machine, then the engine's speed against them"
    )
    command_arguments.bench_arguments(bench)
    bench.set_defaults(run=_bench)


def _doctor_arguments(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor", help="what stops or slows training on this machine, and what mends it"
    )
    command_arguments.runs_dir_argument(doctor)
    doctor.set_defaults(run=_doctor)


def _app_arguments(parser: argparse.ArgumentParser) -> None:
    command_arguments.address_arguments(parser, is_command=False)
    parser.add_argument(
        "--runs-dir",
        type=argument_types.path,
        default=Path(DEFAULT_RUNS),
        help="where runs are kept",
    )
    parser.add_argument(
        "--data-folder",
        action="append",
        default=[],
        type=argument_types.path,
        metavar="FOLDER",
        help="folder in which the page can look for data; may be repeated",
    )
    parser.add_argument(
        "--upload-limit",
        type=argument_types.gib,
        metavar="GIB",
        help="size of one uploaded file at most (20 GiB by default)",
    )
    parser.add_argument(
        "--upload-quota",
        type=argument_types.gib,
        metavar="GIB",
        help="size of all uploaded files at most (100 GiB by default)",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser window")


if __name__ == "__main__":
    sys.exit(main())
