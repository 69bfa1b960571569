"""The server's configuration: the settings of `sglcore serve` other than the engine's, frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType

from sglcore.config.settings import PREFIX, check_values, setting, settings_of
from sglcore.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of the server; `resolve_server_config` makes it. Times are in seconds,
    sizes in bytes. Raises ConfigError when it is made with a value that is out of range, or with
    values that do not go together.

    Requests need no key if both `api_key` and `api_key_file` are empty. `replica_env`:
    `NAME=VALUE`; `{index}` in VALUE is the replica's number, from 0. `ray_resources`:
    `NAME=AMOUNT`, such as CPU=4.
    """

    host: str = setting(
        "127.0.0.1", "Address to listen on; default: 127.0.0.1. 0.0.0.0 listens on all addresses of this machine."
    )
    port: int = setting(8000, "Port to listen on; default: 8000. 0 takes a free one.", least=0)
    served_model_name: tuple[str, ...] = setting(
        (),
        "Model name that requests use; may be repeated. Default: the Hugging Face name, or that of the folder or file.",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Key that a request must send; may be repeated. The page / and the health probes need none."
        " Without keys, every request is served.",
        is_secret=True,
    )
    api_key_file: str | None = setting(
        None,
        "File with keys, one per line, in addition to those of --api-key; lines that begin with # are"
        " skipped. Read only at start-up.",
    )
    ssl_certfile: str | None = setting(None, "PEM file with the server's certificate and its chain; turns TLS on.")
    ssl_keyfile: str | None = setting(
        None,
        "PEM file with the private key, if the file of --ssl-certfile does not contain it. Needs --ssl-certfile.",
    )
    ssl_keyfile_password: str | None = setting(
        None, "Password of the private key. Needs --ssl-certfile.", is_secret=True
    )
    ssl_ca_certs: str | None = setting(
        None,
        "File with CA certificates. Clients must then present a certificate signed by one"
        " of them. Needs --ssl-certfile.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Additional host name, without port, that a request's Host header may have; may be"
        " repeated, * allows all; others get 403. Not checked if --host is no loopback address and"
        " this flag is not given.",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origin, such as https://example.org, whose pages may call the server from a browser; may be"
        " repeated, * allows all. Default: none.",
    )
    max_request_bytes: int = setting(
        8 << 20,
        "Maximum size of a request body, in bytes, except an uploaded batch file; more gets 413."
        " Default: 8388608 (8 MiB).",
        least=1,
    )
    max_batch_file_bytes: int = setting(
        200 << 20,
        "Maximum size of an uploaded batch file, in bytes; more gets 413. No effect without"
        " --batch-folder. Default: 209715200 (200 MiB).",
        least=1,
    )
    max_header_bytes: int = setting(
        32 << 10,
        "Maximum size of a request's URL and headers, in bytes; more gets 431. Default: 32768 (32 KiB).",
        least=1,
    )
    max_connections: int = setting(
        4096,
        "Maximum number of open connections; default: 4096, or less if the limit of open files is lower. More get 503.",
        least=1,
    )
    max_concurrent_requests: int = setting(
        1024, "Maximum number of POST requests in progress, waiting ones too; more get 429. Default: 1024.", least=1
    )
    max_queued_requests: int = setting(
        2048,
        "Maximum number of samples that wait for a place in a batch, over all replicas;"
        " requests beyond it get 429. Default: 2048.",
        least=0,
    )
    max_prompts: int = setting(
        1024, "Maximum number of prompts, or texts to embed, in one request; more get 400. Default: 1024.", least=1
    )
    max_n: int = setting(
        64,
        "Maximum number of samples per prompt (n), more get 400; all prompts of a request together may"
        " have more, up to --max-prompts. Default: 64.",
        least=1,
    )
    max_logprobs: int = setting(
        20, "Maximum number of alternatives per token (top_logprobs); more get 400. Default: 20.", least=0
    )
    max_hidden_states: int = setting(
        2 << 20,
        "Maximum number of values in the hidden states of one answer, tokens times hidden size times samples;"
        " a request beyond it gets 400. Default: 2097152. 0: no answer has any.",
        least=0,
    )
    max_prompt_tokens: int | None = setting(
        None,
        "Maximum number of tokens in a prompt; longer ones get 400. Default: what the context length allows.",
        least=1,
    )
    vllm_metrics: bool = setting(False, "Export the metrics under vLLM's names as well. Default: off.")
    strict_fields: bool = setting(
        False,
        "Reject requests that have unknown fields (400). Default: off, which ignores them and"
        " names them in a response header.",
    )
    max_stored_responses: int = setting(
        256,
        "Maximum number of /v1/responses answers kept in memory for later requests, up to 64 MiB in"
        " total; the oldest are dropped, and a restart loses all. 0 keeps none. Default: 256.",
        least=0,
    )
    batch_folder: str | None = setting(
        None,
        "Folder that stores the files and batches of /v1/files and /v1/batches; made if it is missing,"
        " for one server only. Default: both are off.",
    )
    max_batch_requests: int = setting(
        16,
        "Maximum number of batch requests that run at the same time. No effect without --batch-folder. Default: 16.",
        least=1,
    )
    header_timeout: float = setting(10.0, "Seconds that a client may take to send the request headers; default: 10.")
    body_timeout: float = setting(
        30.0,
        "Seconds that a client may take to send the request body, or each --max-request-bytes"
        " of an uploaded batch file; default: 30.",
    )
    write_timeout: float = setting(
        120.0,
        "Seconds that a client may take to read what fills the send buffer of its connection;"
        " then it is disconnected. Default: 120.",
    )
    sse_keep_alive: float = setting(
        15.0, "Seconds without output after which a stream sends a comment to keep the connection open; default: 15."
    )
    keep_alive: float = setting(
        75.0,
        "Seconds that a connection stays open after an answer, for a next request; default: 75.",
    )
    drain_timeout: float = setting(
        30.0,
        "Seconds that running requests may take to finish after SIGTERM or Ctrl-C, while new ones are"
        " refused; then they fail. A second signal stops at once. Default: 30.",
    )
    shutdown_timeout: float = setting(
        10.0,
        "Seconds that an engine process may take to release its device at shutdown; then it is killed. Default: 10.",
    )
    restart: bool = setting(
        False,
        "Restart an engine process that died, until 3 starts in a row fail. Default: off, and the server"
        " ends too. No effect with --replicas above 1, which are always restarted. With --nodes: give it"
        " on each host; an error if a launcher such as torchrun restarts the hosts.",
    )
    heartbeat_timeout: float = setting(
        20.0,
        "Seconds without a heartbeat after which an engine process is killed (then as --restart says),"
        " at least 120 during its start; default: 20.",
    )
    step_timeout: float = setting(
        600.0,
        "Seconds that one step may take before its engine process is killed (then as --restart says); default: 600.",
    )
    replicas: int = setting(
        1,
        "Number of engine processes (data parallel replicas) behind this endpoint, each with a whole"
        " model on --tp devices of its own; on cpu they share the processor. An error with --nodes"
        " above 1. Default: 1.",
        least=1,
    )
    replica_env: tuple[str, ...] = setting(
        (),
        "Environment variable of each replica, NAME=VALUE, where {index} is its number from 0; may be repeated."
        " If one contains {index}, it is taken to select each replica's devices, and none are assigned."
        " SGLCORE_* is an error.",
    )
    role: str = setting(
        "both",
        "Role in prefill/decode disaggregation: both (default: no disaggregation), prompt"
        " (prefill, also for other engines; needs --pages-address), or decode (the engines"
        " of --peers prefill). prompt and decode: speculation is off; an error with --tp above 1, a"
        " kind of --speculative, --hisparse, --task embed, and on some models.",
        choices=("both", "prompt", "decode"),
    )
    peers: tuple[str, ...] = setting(
        (),
        "Prefill engines of a decode engine: HOST:PORT at which each one's --pages-address is"
        " reached (not its --port); separated by commas, or repeated. Only with --role decode,"
        " which needs it.",
    )
    pages_address: str | None = setting(
        None,
        "HOST:PORT on which a prefill engine serves KV pages; each further replica takes"
        " the next port. Only with --role prompt, which needs it.",
    )
    pages_secret: str | None = setting(
        None,
        "Secret that prefill and decode engines share; connections without it are refused."
        " Needed if --pages-address is not a loopback address. No effect with --role both.",
        is_secret=True,
    )
    ray: str | None = setting(
        None,
        "Start the replicas, or with --nodes the other hosts of one model, with Ray: auto (the cluster"
        " that this machine is in), HOST:PORT of its head, or local (a new cluster of this machine)."
        " Needs sglcore[ray].",
    )
    ray_resources: tuple[str, ...] = setting(
        (),
        "Ray resource that each replica reserves, NAME=AMOUNT, such as GPU=1; may be repeated. Needs --ray;"
        " an error with --nodes above 1. Default: CPU=1 and no accelerator.",
    )
    tool_parser: str = setting(
        "auto",
        "Parser of tool calls: auto (default: detected from the chat template), off (requests with tools are"
        " refused), or a parser's name (an error if it does not fit the chat template).",
    )
    reasoning_parser: str = setting(
        "auto",
        "Parser of reasoning: auto (default: detected from the chat template), off, or a parser's name"
        " (an error if it fails its test with this tokenizer).",
    )
    chat_template: str | None = setting(
        None, "File with a Jinja chat template that replaces the checkpoint's. An error with --skip-tokenizer."
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "OTLP/HTTP collector that receives a trace of each request, such as http://127.0.0.1:4318. Default: the tracer"
        " provider that OpenTelemetry's agent gave this process; without one, no traces.",
    )
    log_file: str | None = setting(None, "File that log lines are appended to; default: standard error.")
    log_level: str = setting(
        "info", "Log level: debug, info (default), warning or error.", choices=("debug", "info", "warning", "error")
    )
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Where each value that is no default came from, by the setting's name: "argument" or the
    environment variable."""

    def __post_init__(self) -> None:
        check_values(self)
        for name in (item.name for item in settings_of(ServerConfig).values() if item.kind == "float"):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name != "drain_timeout"):
                raise ConfigError(f"{name} is {value}", wanted="a number of seconds above 0", remedy=f"correct {name}")
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}", wanted="a number from 0 to 65535", remedy="correct port")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_keyfile_password):
            raise ConfigError("found a flag of TLS without a certificate", wanted="ssl_certfile", remedy="give one")
        for place, key in enumerate(self.api_key, 1):
            _check_key(key, f"key {place} of api_key")
        for each in self.replica_env:
            _check_variable(each)
        for each in self.ray_resources:
            _resource(each)
        if self.ray_resources and self.ray is None:
            raise ConfigError("found ray_resources without ray", wanted="both or neither", remedy="give ray")

    def variables_of(self, replica: int) -> dict[str, str]:
        """Return the environment variables by name that `replica_env` sets for replica number
        `replica` (from 0). The last entry of a name counts."""
        pairs = (each.partition("=") for each in self.replica_env)
        return {name: value.replace("{index}", str(replica)) for name, _, value in pairs}

    @property
    def resources(self) -> dict[str, float]:
        """The Ray resources of each replica: amount by Ray's name, from `ray_resources`."""
        return dict(_resource(each) for each in self.ray_resources)

    @property
    def is_loopback(self) -> bool:
        """Whether `host` is a loopback address, so that only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address in digits. Other names are not
    resolved: False."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: str) -> tuple[str, ...]:
    """Return the keys of the file `path`, one per line, without empty lines and lines that begin
    with `#`. Raises ConfigError if the file cannot be read, has no key, or has a line that is not a
    key."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"api_key_file {path} cannot be read: {reason}", remedy="correct api_key_file") from None
    keys = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
    for number, key in keys.items():
        _check_key(key, f"line {number} of {path}")
    if not keys:
        raise ConfigError(f"api_key_file {path} has no key", wanted="one key a line", remedy="add one, or leave it out")
    return tuple(keys.values())


def _check_key(key: str, where: str) -> None:
    """Raise ConfigError unless `key` is printable ASCII without spaces and not empty, which an HTTP
    header can carry. The error names its place `where` and does not repeat the key."""
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(f"{where} is not a key", wanted="printable ASCII without spaces", remedy="replace it")


def _check_variable(text: str) -> None:
    """Raise ConfigError for an entry of `replica_env` that is not NAME=VALUE or names a variable of
    the engine (`SGLCORE_*`): an engine process gets its settings by value and would not read the
    variable."""
    name, equals, _ = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"replica_env has {text!r}", wanted="NAME=VALUE", remedy="correct replica_env")
    if name.startswith(PREFIX):
        raise ConfigError(
            f"replica_env has {name}, which an engine process does not read: its settings come from the server's",
            wanted="a variable of a library or a driver",
            remedy=f"set {name} for the server, where it holds for every replica",
        )


def _resource(text: str) -> tuple[str, float]:
    """Return the name and the amount of an entry NAME=AMOUNT of `ray_resources`. Raises ConfigError
    for an empty name, and for an amount that is not a finite number of 0 or more."""
    name, _, amount = text.partition("=")
    try:
        number = float(amount)
    except ValueError:
        number = -1.0
    if not name or not 0.0 <= number < math.inf:
        raise ConfigError(
            f"ray_resources has {text!r}", wanted="NAME=AMOUNT, such as CPU=4", remedy="correct ray_resources"
        )
    return name, number
