"""The commands around a service: `serve` runs one, the others talk to one at --url with --api-key."""

from pathlib import Path
from typing import Annotated

import typer

from marlaas_jax.cli.options import Json, Set, remote
from marlaas_jax.errors import InvalidConfig

Url = Annotated[str | None, typer.Option("--url", envvar="MARLAAS_URL", help="Of the service.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="MARLAAS_API_KEY", help="Yours, as mj-...")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as `marlaas jobs` shows it.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="KEY=VALUE; may be repeated.")]

tenant_app = typer.Typer(no_args_is_help=True, help="Tenants of a service and their API keys; takes an admin's key.")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (serve, submit, jobs, watch, events, episodes, pause, resume, cancel, checkpoints, rollback, delete, why):
        app.command()(command)
    for command in (sweep, sweeps, usage, fairness):
        app.command()(command)
    app.command("env-worker")(env_worker)
    app.add_typer(tenant_app, name="tenant")


def serve(
    file: Annotated[Path | None, typer.Argument(metavar="[SERVICE.YAML]", help="All defaults without one.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a key: port=0, runtime.model=tiny.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="In the background; returns once it answers.")] = False,
    json: Json = False,
) -> None:
    """Serves jobs of many tenants over HTTP until SIGTERM or an interrupt; then running steps are saved first."""
    with remote():
        try:
            from marlaas_jax.cli import serve as command
        except ModuleNotFoundError as error:
            raise InvalidConfig(f"marlaas serve needs {error.name}; pip install 'marlaas-jax[service]'") from None
        (command.detach if detach else command.run)(file, list(overrides or ()), json)


def submit(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Job files; the reward and data files they name are sent along.")
    ] = None,
    sweep_file: Annotated[
        Path | None, typer.Option("--sweep", metavar="SWEEP.YAML", help="Instead of job files: one job in many variants.")
    ] = None,
    overrides: Set = None,
    name: Annotated[str | None, typer.Option(help="Instead of the job's own; for one job.")] = None,
    priority: Annotated[int, typer.Option(help="Among your own jobs; the highest goes first.")] = 0,
    label: Labels = None,
    file: Annotated[list[Path] | None, typer.Option("--file", help="Sent too, such as a module that a reward imports.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it is over; for one job.")] = False,
    quote: Annotated[bool, typer.Option("--quote", help="Estimate time and cost; queue nothing.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Queues the jobs of one or more files, or a sweep."""
    from marlaas_jax.cli import remote as command
    from marlaas_jax.cli import remote_usage as usage_command

    with remote():
        target = command.Target(url, api_key)
        code = 0
        if sweep_file is not None:
            from marlaas_jax.cli import remote_sweeps

            if files or overrides or name is not None or quote or watch:
                raise InvalidConfig(
                    "--sweep: takes no job files, --set, --name, --quote or --watch; the sweep file holds its job"
                )
            remote_sweeps.submit(target, sweep_file, priority, label or [], file or [], json)
        elif files and quote:
            usage_command.quote(target, files, list(overrides or ()), file or [], json)
        elif files:
            ids = command.submit(target, files, list(overrides or ()), name, priority, label or [], file or [], watch, json)
            code = command.watch(target, ids[0], json) if watch else 0
        else:
            raise InvalidConfig("marlaas submit: name at least one job file, or --sweep SWEEP.YAML")
    raise typer.Exit(code)


def sweep(
    sweep_id: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep's id, as `marlaas sweeps` shows it.")],
    cancel_it: Annotated[bool, typer.Option("--cancel", help="End it and its trials that have not ended.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Shows a sweep: each trial with what it changes, how far it is and how well it does; * marks the best."""
    from marlaas_jax.cli import remote as command
    from marlaas_jax.cli import remote_sweeps

    with remote():
        remote_sweeps.show(command.Target(url, api_key), sweep_id, cancel_it, json)


def sweeps(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Lists sweeps, the newest first."""
    from marlaas_jax.cli import remote as command
    from marlaas_jax.cli import remote_sweeps

    with remote():
        remote_sweeps.show_all(command.Target(url, api_key), json)


def jobs(
    state: Annotated[list[str] | None, typer.Option(help="Only those in this state; may be repeated.")] = None,
    name: Annotated[str | None, typer.Option(help="Only those whose name begins so.")] = None,
    label: Labels = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest first.")] = 50,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Lists jobs, the newest first."""
    from marlaas_jax.cli import remote as command

    with remote():
        command.jobs(command.Target(url, api_key), state or [], name, label or [], limit, json)


def watch(job: JobId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Follows a job, a line per batch, until it is over; exits with 1 unless it succeeded."""
    from marlaas_jax.cli import remote as command

    with remote():
        code = command.watch(command.Target(url, api_key), job, json)
    raise typer.Exit(code)


def events(
    job: JobId,
    after: Annotated[int, typer.Option(min=0, help="Only those behind this number.")] = 0,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Prints everything that happened to a job and follows it until it is over."""
    from marlaas_jax.cli import remote as command

    with remote():
        command.events(command.Target(url, api_key), job, after, json)


def episodes(
    job: JobId,
    step: Annotated[int | None, typer.Option(min=1, help="Of this batch.")] = None,
    min_reward: Annotated[float | None, typer.Option()] = None,
    max_reward: Annotated[float | None, typer.Option()] = None,
    outcome: Annotated[str | None, typer.Option(help="finished, truncated, timed_out, failed or cancelled.")] = None,
    split: Annotated[str | None, typer.Option(help="train or eval.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the oldest first.")] = 20,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Prints episodes of a job to read: what the model was asked, what it answered, what that earned."""
    from marlaas_jax.cli import remote as command

    with remote():
        which = {"step": step, "min_reward": min_reward, "max_reward": max_reward, "outcome": outcome, "split": split}
        command.episodes(command.Target(url, api_key), job, which, limit, json)


def pause(job: JobId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Pauses a queued or running job; what it has begun is trained and saved."""
    _act("pause", job, url, api_key, json)


def resume(job: JobId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Puts a paused job back into the queue."""
    _act("resume", job, url, api_key, json)


def cancel(job: JobId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Ends a job for good; what it trained stays."""
    _act("cancel", job, url, api_key, json)


def checkpoints(job: JobId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Lists the committed steps of a job that are kept."""
    from marlaas_jax.cli import remote as command

    with remote():
        command.checkpoints(command.Target(url, api_key), job, json)


def rollback(
    job: JobId,
    step: Annotated[int, typer.Argument(min=0, metavar="STEP", help="A committed step, as `marlaas checkpoints` lists them.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Takes a job back to a committed step; a running job goes on from there, any other waits to be resumed."""
    from marlaas_jax.cli import remote as command

    with remote():
        command.rollback(command.Target(url, api_key), job, step, json)


def delete(job: JobId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Deletes an ended job and all its files."""
    _act("delete", job, url, api_key, json)


def why(job: JobId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Says in one line what a job waits for."""
    from marlaas_jax.cli import remote as command

    with remote():
        command.why(command.Target(url, api_key), job, json)


def usage(
    first_day: Annotated[str | None, typer.Option("--from", help="Of UTC, as 2026-12-01.")] = None,
    last_day: Annotated[str | None, typer.Option("--to", help="Inclusive.")] = None,
    job: Annotated[str | None, typer.Option(help="Of this job only, by id.")] = None,
    by: Annotated[list[str] | None, typer.Option(help="day, job or tenant; may be repeated.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="As comma-separated values.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Shows what was used and its cost, by day and job; with an admin's key by tenant."""
    from marlaas_jax.cli import remote_usage as command

    with remote():
        command.usage(command.Target(url, api_key), first_day, last_day, job, by or [], csv, json)


def fairness(
    window: Annotated[float, typer.Option(help="Seconds of the shares.")] = 60.0,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Shows how long work waited in each stage, and how even the shares of the device were."""
    from marlaas_jax.cli import remote_usage as command

    with remote():
        command.fairness(command.Target(url, api_key), window, json)


def env_worker(
    env: Annotated[str, typer.Argument(help="What it runs: my_env.py, my_env.py:function, or a family as words:last_word.")],
    connect: Annotated[str | None, typer.Option(help="tcp://HOST:PORT of the service; asked of --url when left out.")] = None,
    key: Annotated[str | None, typer.Option(envvar="MARLAAS_API_KEY", help="Your API key.")] = None,
    server_key: Annotated[str | None, typer.Option(help="The service's public key; asked of --url when left out.")] = None,
    name: Annotated[str | None, typer.Option(help="Jobs say `env: remote:NAME`; default: the file's name.")] = None,
    url: Url = None,
) -> None:
    """Runs an environment here for your jobs on a service, over an encrypted connection, until it is interrupted."""
    from marlaas_jax.cli import env_worker as command

    with remote():
        code = command.run(connect, key, server_key, url, env, name)
    raise typer.Exit(code)


def _act(action: str, job: str, url: str | None, api_key: str | None, json: bool) -> None:
    from marlaas_jax.cli import remote as command

    with remote():
        command.act(command.Target(url, api_key), action, job, json)


@tenant_app.command("create")
def tenant_create(
    name: str,
    admin: Annotated[bool, typer.Option("--admin", help="May do everything.")] = False,
    weight: Annotated[float, typer.Option(help="Share of what tenants compete for.")] = 1.0,
    quota: Annotated[list[str] | None, typer.Option("--quota", help="KEY=VALUE, as max_running_jobs=8.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Adds a tenant and prints its first API key, which cannot be shown again."""
    from marlaas_jax.cli import remote_tenants as command

    with remote():
        command.create(command.Target(url, api_key), name, admin, weight, quota or [], json)


@tenant_app.command("list")
def tenant_list(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Lists tenants and the beginnings of their keys."""
    from marlaas_jax.cli import remote_tenants as command

    with remote():
        command.show(command.Target(url, api_key), json)


@tenant_app.command("key")
def tenant_key(
    tenant: Annotated[str, typer.Argument(help="Name or id.")], url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Makes another API key for a tenant."""
    from marlaas_jax.cli import remote_tenants as command

    with remote():
        command.key(command.Target(url, api_key), tenant, json)


@tenant_app.command("revoke")
def tenant_revoke(
    key: Annotated[str, typer.Argument(help="A key's id, as `marlaas tenant list` shows it.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Ends an API key at once and for good."""
    from marlaas_jax.cli import remote_tenants as command

    with remote():
        command.revoke(command.Target(url, api_key), key, json)
