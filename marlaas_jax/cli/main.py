"""The command line. Each command imports what it needs when it runs, so `marlaas --help` is quick and loads no JAX.

Exit codes: 0 all well; 1 a job failed; 2 the caller can mend it (one sentence on standard error); 130 interrupted;
143 terminated.
"""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

import marlaas_jax
from marlaas_jax.cli import service_commands
from marlaas_jax.cli.options import Json, Set, one_sentence, remote
from marlaas_jax.errors import InvalidConfig

INTRO = """Trains many LoRA adapters at once on one language model, by reinforcement learning, each with its own task.

Start with `marlaas run JOB.yaml`; try the result with `marlaas sample` or `marlaas chat`; `marlaas doctor` says what is
missing. `marlaas COMMAND --help` explains a command."""
MODEL_HELP = "smollm2-135m, tiny, a folder, a .gguf file or a Hub id."
ADAPTER_HELP = "A PEFT folder, RUN_DIR/JOB, or RUN_DIR/JOB@STEP for the checkpoint after that step."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=INTRO)
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks: ratios from interleaved runs in one process.")
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"marlaas {marlaas_jax.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What comes before a command."""


def is_terminal() -> bool:
    """Returns whether a person reads standard error."""
    return sys.stderr.isatty()


def hint(text: str) -> None:
    """Tells whoever sits at a terminal; scripts and pipes see nothing of it."""
    if is_terminal():
        typer.echo(text, err=True)


@app.command()
def run(
    files: Annotated[list[Path] | None, typer.Argument(help="Job files (YAML); several are run together.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Run folder; default runs/<first file's name>-<time>.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last committed step of each job in --dir.")] = False,
    overrides: Set = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check everything that can be; print the resolved configuration; run nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Trains the jobs of one or more files at once on one base model; no server needed."""
    from marlaas_jax.cli import run as command

    with one_sentence():
        code = command.run(files or [], directory, resume, list(overrides or ()), check, json)
    raise typer.Exit(code)


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="RUN_DIR/JOB or RUN_DIR/JOB@STEP.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    merged: Annotated[
        bool, typer.Option(help="Write the merged model as Hugging Face safetensors, not a PEFT adapter.")
    ] = False,
    json: Json = False,
) -> None:
    """Writes a job's adapter as a PEFT folder, or merged into its base as a Hugging Face model."""
    from marlaas_jax.cli import export as command

    with one_sentence():
        report = command.export(source, out, merged)
    typer.echo(jsonlib.dumps(report) if json else f"wrote {report['path']} (step {report['step']})")


@app.command()
def sample(
    prompt: Annotated[str, typer.Argument(help="Text to continue; with --chat a user message.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2-135m",
    adapter: Annotated[str | None, typer.Option(help=ADAPTER_HELP)] = None,
    n: Annotated[int, typer.Option(min=1, max=10_000, help="Number of samples.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Fresh randomness when not given.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render the prompt with the chat template.")] = False,
    url: Annotated[str | None, typer.Option(help="A service's; --model is its base's name, JOB or JOB@STEP.")] = None,
    api_key: service_commands.ApiKey = None,
    json: Json = False,
) -> None:
    """Samples from the base model or an adapter, here or at a service, with log-probs under --json."""
    if url is not None:
        from marlaas_jax.cli import remote as at_service

        options = {"n": n, "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        with remote():
            at_service.sample(
                at_service.Target(url, api_key), prompt, model, adapter, options | {"stop": stop, "seed": seed}, chat, json
            )
        return
    from marlaas_jax.cli import sample as command

    with one_sentence():
        hint(f"loading {model}")
        request = command.Request(n, max_tokens, temperature, top_k, top_p, min_p, tuple(stop or ()), seed, chat)
        for answer in command.sample(prompt, model, adapter, request):
            typer.echo(jsonlib.dumps(answer) if json else answer["text"])
            if not answer["text"].strip():
                hint(f"(empty answer: finish reason {answer['finish_reason']})")


@app.command()
def chat(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2-135m",
    adapter: Annotated[str | None, typer.Option(help=ADAPTER_HELP)] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
) -> None:
    """Talks with the base model or an adapter; an empty line or end of input ends."""
    from marlaas_jax.cli import sample as command

    with one_sentence():
        hint(f"loading {model}")
        command.chat(model, adapter, system, max_tokens, temperature, sys.stdin)


@app.command("jetstream-server")
def jetstream_server(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2-135m",
    adapter: Annotated[list[str] | None, typer.Option(metavar="NAME=SOURCE", help=f"{ADAPTER_HELP} May be repeated.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 9000,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: engine.num_decode_slots=64, dtype=bfloat16.")
    ] = None,
    json: Json = False,
) -> None:
    """Serves a base model and adapters to JetStream's own clients, by its orchestrator and gRPC server."""
    from marlaas_jax.cli import jetstream_server as command

    with one_sentence():
        command.run(model, adapter or [], host, port, overrides or [], json)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A job file, to list its compiled programs.")] = None, json: Json = False
) -> None:
    """Prints versions, devices, caches and what is missing; exits non-zero if something needed is."""
    from marlaas_jax.cli import doctor as command

    with one_sentence():
        code = command.run(json, config)
    raise typer.Exit(code)


@bench_app.command("engine")
def bench_engine(
    quick: Annotated[bool, typer.Option(help="Fewer repeats.")] = False,
    reference_python: Annotated[str | None, typer.Option(help="Interpreter with torch, transformers and peft.")] = None,
    json: Json = False,
) -> None:
    """Decoding and prefill: adapters against base, slots, transformers and peft."""
    from marlaas_jax.bench import engine

    with one_sentence():
        engine.run(json=json, quick=quick, reference_python=reference_python)


@bench_app.command("learner")
def bench_learner(quick: Annotated[bool, typer.Option(help="Fewer repeats.")] = False, json: Json = False) -> None:
    """The multi-adapter update: against separate steps, plain forms, files and cold compiles."""
    from marlaas_jax.bench import learner

    with one_sentence():
        learner.run(json=json, quick=quick)


@bench_app.command("run")
def bench_run(quick: Annotated[bool, typer.Option(help="The tiny model, a few steps.")] = False, json: Json = False) -> None:
    """One job by `marlaas run` against a plain loop in one process; how long decoding waits for training."""
    from marlaas_jax.bench import run

    with one_sentence():
        run.run(json=json, quick=quick)


@bench_app.command("streams")
def bench_streams(
    quick: Annotated[bool, typer.Option(help="Fewer streams, a few seconds.")] = False, json: Json = False
) -> None:
    """A service that trains under a thousand event streams and a hundred requests per second."""
    with one_sentence():
        try:
            from marlaas_jax.bench import streams
        except ModuleNotFoundError as error:
            raise InvalidConfig(f"marlaas bench streams needs {error.name}; pip install 'marlaas-jax[service]'") from None
        streams.run(json=json, quick=quick)


@bench_app.command("service")
def bench_service(
    quick: Annotated[bool, typer.Option(help="A few tenants, a few steps.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of arrivals; printed, drawn when not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for records and pictures; default runs/day-<time>.")] = None,
    json: Json = False,
) -> None:
    """A scripted day of 32 tenants on a real service: outcomes, rewards, shares of the device, waits."""
    with one_sentence():
        try:
            from marlaas_jax.bench.service import command
        except ModuleNotFoundError as error:
            raise InvalidConfig(f"marlaas bench service needs {error.name}; pip install 'marlaas-jax[service]'") from None
        command.run(json=json, quick=quick, seed=seed, out=out)


@bench_app.command("exact")
def bench_exact(quick: Annotated[bool, typer.Option(help="The tiny model, few repeats.")] = False, json: Json = False) -> None:
    """What `isolation: exact` costs, and whether it holds on this machine and backend."""
    from marlaas_jax.bench import exact

    with one_sentence():
        exact.run(json=json, quick=quick)


service_commands.register(app)


def main() -> None:
    """Entry point of the `marlaas` command."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
