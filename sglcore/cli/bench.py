"""The commands `sglcore bench serve` and `sglcore bench offline`: one load, for a server or for an
engine in this process.

They print tables of the results on standard output (banner and progress go to the error stream),
and can write JSON and a plot to files. If a request failed, the exit code is 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglcore.cli import options
from sglcore.cli.bench_links import links
from sglcore.cli.setting_flags import engine_settings, with_settings
from sglcore.cli.usage import Command
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError

if TYPE_CHECKING:
    from sglcore.bench.address import Address
    from sglcore.bench.figures import Figures
    from sglcore.bench.long_prompt_effect import Beside
    from sglcore.bench.request_record import Record
    from sglcore.bench.workload import Job, Workload

NumPrompts = Annotated[int, typer.Option(help="Total number of requests.")]
InputLen = Annotated[str, typer.Option(help="Prompt length in tokens: a number, or a range such as 32..256.")]
OutputLen = Annotated[
    str, typer.Option(help="Output length in tokens: a number, or a range. The end-of-sequence token is ignored.")
]
SharedPrefix = Annotated[
    int,
    typer.Option(
        help="Number of tokens in a common prefix, in addition to --random-input-len, except of long prompts."
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Random seed of prompts, lengths and arrivals. With the same seed, a running server"
        " has the prompts in its cache."
    ),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results and every request to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Plot the results to this PNG file; needs matplotlib.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        help="Latency goal in milliseconds, such as ttft:200, tpot:50 or e2e:5000; may be repeated. Also reports the"
        " requests per second that meet all of them."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
ApiKey = Annotated[str, typer.Option(help="API key of the server.", envvar="SGLCORE_API_KEY", show_envvar=True)]
VocabSize = Annotated[
    int | None,
    typer.Option(
        help="Vocabulary size; prompts use token ids below it. Default: read from /server_info, which only sglcore has."
    ),
]
RequestRate = Annotated[str, typer.Option(help="Requests per second (Poisson arrivals); inf sends all at once.")]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(help="Maximum number of requests in flight; the client holds back the rest. Default: no limit."),
]
LongPrompts = Annotated[
    int, typer.Option(help="Number of extra long prompts, to measure how much they delay the tokens of other requests.")
]


def serve(
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = "",
    model_name: Annotated[str | None, typer.Option(help="Model name on the server; default: the first one.")] = None,
    vocab_size: VocabSize = None,
    num_prompts: NumPrompts = 100,
    request_rate: RequestRate = "inf",
    max_concurrency: MaxConcurrency = None,
    random_input_len: InputLen = "32..128",
    random_output_len: OutputLen = "32..64",
    shared_prefix: SharedPrefix = 0,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    long_prompts: LongPrompts = 0,
    long_tokens: Annotated[
        int, typer.Option(help="Length of each long prompt in tokens. No effect without --long-prompts.")
    ] = 8192,
    long_every: Annotated[
        float,
        typer.Option(help="Seconds between long prompts, and before the first. No effect without --long-prompts."),
    ] = 5.0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0,
    goodput: Goodput = None,
    json_file: Json = None,
    plot: Plot = None,
    quiet: Quiet = False,
) -> None:
    """Benchmark a running server with streaming requests to /v1/completions.

    With a finite --request-rate, requests arrive at random times, whether or not the server keeps
    up. Latency is measured from the time at which a request was due, so it includes waiting in this
    client and for --max-concurrency: otherwise a slow server would hide the waits that it causes.
    "lag" is how late requests were sent. With --request-rate inf, latency is measured from the time
    of sending.
    """
    from sglcore.bench import workload
    from sglcore.bench.address import address, served_model
    from sglcore.bench.figures import goals_of
    from sglcore.bench.load import Offer, run_load

    load = _workload(num_prompts, random_input_len, random_output_len, shared_prefix, seed, request_rate)
    load = replace(load, long_prompts=long_prompts, long_len=long_tokens, long_every=long_every)
    goals = goals_of(goodput or ())
    _check_outputs(json_file, plot)
    _check_concurrency(max_concurrency)
    where = address(url, api_key)
    vocabulary, longest = (vocab_size, None) if vocab_size else _limits(where)
    jobs = workload.make_jobs(load, vocabulary, longest)
    offer = Offer(
        where=where,
        model=model_name or served_model(where),
        is_open=load.is_open,
        max_concurrency=max_concurrency,
        timeout=timeout,
        temperature=temperature,
    )
    records = _with_bar(lambda done: run_load(offer, jobs, done), jobs, quiet=quiet)
    about = {"kind": "serve", "url": str(where), "model": offer.model, "max_concurrency": max_concurrency}
    _report(about, load, records, goals, json_file, plot)


def offline(
    model: options.ModelArgument = None,
    num_prompts: NumPrompts = 100,
    random_input_len: InputLen = "32..128",
    random_output_len: OutputLen = "32..64",
    shared_prefix: SharedPrefix = 0,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    goodput: Goodput = None,
    json_file: Json = None,
    plot: Plot = None,
    quiet: Quiet = False,
    verbose: options.Verbose = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Benchmark the engine without a server, in this process, with the load of `bench serve
    --request-rate inf`."""
    from sglcore.bench import workload
    from sglcore.bench.figures import goals_of
    from sglcore.bench.offline import run_offline
    from sglcore.cli.banner import show_banner
    from sglcore.engine.llm import LLM

    load = _workload(num_prompts, random_input_len, random_output_len, shared_prefix, seed, "inf")
    goals = goals_of(goodput or ())
    _check_outputs(json_file, plot)
    with LLM(model, show_progress=not quiet, **engine_settings(settings)) as llm:
        if not quiet:
            show_banner(llm.started, verbose=verbose)
        limits = llm.engine.worker.limits
        jobs = workload.make_jobs(load, limits.vocab_size, limits.max_model_len)
        records = _with_bar(lambda done: run_offline(llm, jobs, done, temperature=temperature), jobs, quiet=quiet)
        about = {"kind": "offline", "model": str(llm.started.model_path), "device": str(llm.started.choice.chosen)}
    _report(about, load, records, goals, json_file, plot)


def make_bench() -> typer.Typer:
    """Return a typer application with the commands below `sglcore bench`: serve, offline and
    links."""
    app = typer.Typer(
        help="Benchmark a server, the engine alone, or the links between ranks.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command(cls=Command, short_help="Benchmark a running server.")(serve)
    app.command("offline", cls=Command, short_help="Benchmark the engine without a server, in this process.")(
        with_settings(offline, EngineConfig)
    )
    app.command("links", cls=Command, short_help="Benchmark collectives between ranks on this machine.")(
        with_settings(links, EngineConfig)
    )
    return app


def _workload(count: int, inputs: str, outputs: str, shared: int, seed: int, rate: str) -> Workload:
    from sglcore.bench import workload

    return workload.Workload(
        num_prompts=count,
        input_len=workload.span("random-input-len", inputs),
        output_len=workload.span("random-output-len", outputs),
        shared_prefix=shared,
        request_rate=workload.rate(rate),
        seed=seed,
    )


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Raise ConfigError if the folder of an output file does not exist, or if matplotlib is missing
    for the plot, so that no load runs in vain."""
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {str(path.absolute().parent)!r}", remedy="make it, or name another")
    if plot is not None:
        from sglcore.bench.plot import require_matplotlib

        require_matplotlib()


def _check_concurrency(most: int | None) -> None:
    if most is not None and most < 1:
        raise ConfigError(f"max-concurrency is {most}", wanted="at least 1")


def _limits(where: Address) -> tuple[int, int]:
    """Return the vocabulary size and the context length, in tokens, that an sglcore server reports;
    waits for the answer.

    Raises ServerError if it cannot be reached, is not sglcore, or is not ready.
    """
    from sglcore.bench.address import ServerError, get_json

    remedy = "give --vocab-size, if this server is not sglcore"
    try:
        info = get_json(where, "/server_info")
    except ServerError as error:
        raise ServerError(error.found, remedy=remedy) from None
    if not isinstance(info, dict) or "limits" not in info:
        raise ServerError(f"{where}/server_info does not report the limits", remedy=remedy)
    if info["limits"] is None:
        ends = info["phase"] in ("draining", "dead")
        remedy = "start it again" if ends else "wait until /readyz answers 200"
        raise ServerError(f"{where} is not ready (phase: {info['phase']})", remedy=remedy)
    return int(info["limits"]["vocab_size"]), int(info["max_model_len"])


def _with_bar(run: Callable[..., list[Record]], jobs: Sequence[Job], *, quiet: bool) -> list[Record]:
    from sglcore.engine.progress import Progress

    ended: list[int] = []

    def done(record: Record) -> None:
        ended.append(record.number)
        progress.phase("requests", len(ended), len(jobs))

    with Progress(enabled=not quiet) as progress:
        progress.phase("requests", 0, len(jobs))
        return run(done)


def _report(
    about: Mapping[str, object],
    load: Workload,
    records: Sequence[Record],
    goals: dict[str, float],
    json_file: Path | None,
    plot: Path | None,
) -> None:
    from sglcore import __version__
    from sglcore.bench.figures import figures
    from sglcore.bench.long_prompt_effect import beside

    found, mixed = figures(records, goals), beside(records)
    if json_file is not None:
        about = {"sglcore": __version__, **about, "workload": load.as_json()}
        rows = [record.as_json() for record in records]
        json_file.write_text(
            json.dumps({**about, "figures": found.as_json(), **_mixed(mixed), "requests": rows}, indent=1) + "\n"
        )
    if plot is not None:
        from sglcore.bench.plot import save_plot

        save_plot(plot, records, found, f"sglcore bench {about['kind']}")
    _show(found, mixed)
    if found.whole < found.requests:
        raise typer.Exit(1)


def _mixed(mixed: Beside | None) -> dict[str, object]:
    return {} if mixed is None else {"beside_long_prompts": mixed.as_json()}


def _show(found: Figures, mixed: Beside | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from sglcore.cli.bench_table import beside_table, latency_table, totals_table

    console = Console(highlight=False)
    console.print(totals_table(found))
    console.print(latency_table(found))
    if mixed is not None:
        console.print(beside_table(mixed))
    for kind, failures in found.failures.items():
        line = f"{failures.count} failed: {kind}; the first error: {failures.first}"
        console.print(Text(line, style="red"), soft_wrap=True)
