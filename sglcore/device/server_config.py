"""The server's configuration: what `sglcore serve` was asked for besides the engine's settings, frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType

from sglcore.device.errors import ConfigError
from sglcore.device.settings import PREFIX, check_range, setting, settings_of

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What was asked of the server. Times are seconds, sizes bytes.

    Nobody needs a key if there is none in `api_key` and `api_key_file`. `replica_env`: `NAME=VALUE`, where `{index}` in VALUE
    is the replica's number. `ray_resources`: `NAME=AMOUNT`, such as CPU=4.
    """

    host: str = setting("127.0.0.1", "The address to listen on; 0.0.0.0 for every one of this machine.")
    port: int = setting(8000, "The port to listen on; 0 takes a free one.", least=0)
    served_model_name: tuple[str, ...] = setting((), "The name that requests use; may be given several times.")
    api_key: tuple[str, ...] = setting(
        (), "A key of which a request must bring one; may be given several times.", is_secret=True
    )
    api_key_file: str | None = setting(None, "A file with keys, one a line.")
    ssl_certfile: str | None = setting(None, "A file with a certificate, and those above it: the server speaks TLS.")
    ssl_keyfile: str | None = setting(None, "The certificate's private key, if ssl_certfile has it not.")
    ssl_keyfile_password: str | None = setting(None, "What the private key is encrypted with.", is_secret=True)
    ssl_ca_certs: str | None = setting(
        None, "Certificates of which a client has to bring one, or one that they signed."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "Another name under which a server on loopback answers; may be given several times."
    )
    cors_origins: tuple[str, ...] = setting(
        (), "An origin whose pages may use the server; may be given several times, * is any."
    )
    max_request_bytes: int = setting(8 << 20, "Bytes of a request's body at most.", least=1)
    max_batch_file_bytes: int = setting(200 << 20, "Bytes of a file for a batch at most.", least=1)
    max_header_bytes: int = setting(32 << 10, "Bytes of a request's head at most.", least=1)
    max_connections: int = setting(4096, "Connections at most.", least=1)
    max_concurrent_requests: int = setting(1024, "Requests that are answered at once at most; more get 429.", least=1)
    max_queued_requests: int = setting(2048, "Requests that may wait for a place in a step; more get 429.", least=0)
    max_prompts: int = setting(1024, "Prompts of one request at most.", least=1)
    max_n: int = setting(64, "Samples of each prompt (n) at most.", least=1)
    max_logprobs: int = setting(20, "Alternatives per token at most.", least=0)
    max_prompt_tokens: int | None = setting(
        None, "Tokens of a prompt at most; left out, what the context holds.", least=1
    )
    vllm_metrics: bool = setting(False, "Show the metrics under vLLM's names too.")
    strict_fields: bool = setting(False, "Refuse requests with fields that nobody knows.")
    max_stored_responses: int = setting(256, "Answers of /v1/responses that are kept for later reference.", least=0)
    batch_folder: str | None = setting(
        None, "A folder for the files and batches of /v1/files and /v1/batches; left out, there are none."
    )
    max_batch_requests: int = setting(16, "Requests of batches that run at once at most.", least=1)
    header_timeout: float = setting(10.0, "Seconds that a client has to send a request's head.")
    body_timeout: float = setting(30.0, "Seconds that a client has to send a request's body.")
    write_timeout: float = setting(120.0, "Seconds that a client has to take anything of an answer that is ready.")
    sse_keep_alive: float = setting(
        15.0, "Seconds after which a stream that has nothing to say sends a comment, so that nobody takes it for dead."
    )
    keep_alive: float = setting(75.0, "Seconds that an idle connection stays open.")
    drain_timeout: float = setting(30.0, "Seconds that requests in flight have when the server is told to stop.")
    shutdown_timeout: float = setting(
        10.0, "Seconds that an engine process has to free its device when the server ends; then it is killed."
    )
    restart: bool = setting(False, "Start an engine process again that died.")
    heartbeat_timeout: float = setting(20.0, "Seconds without a sign of life after which an engine process is killed.")
    step_timeout: float = setting(600.0, "Seconds after which an engine process is killed that is in one step still.")
    replicas: int = setting(1, "Engine processes behind this endpoint.", least=1)
    replica_env: tuple[str, ...] = setting((), "A variable for each replica, NAME={index}; may be given several times.")
    role: str = setting(
        "both",
        "What the engines do: both, prompt (compute prompts, for others too), or decode (prompts are computed by --peers).",
    )
    peers: tuple[str, ...] = setting(
        (), "Where prompt engines listen, HOST:PORT, of role decode; several with commas, or given several times."
    )
    pages_address: str | None = setting(
        None, "Where an engine of role prompt listens for those that decode, HOST:PORT; each replica one port further."
    )
    pages_secret: str | None = setting(
        None, "What engines that exchange pages have in common, so that nobody else gets any.", is_secret=True
    )
    ray: str | None = setting(
        None, "Place the replicas, or the nodes of one model, by Ray: the address of a cluster, auto, or local."
    )
    ray_resources: tuple[str, ...] = setting(
        (), "What each replica needs of its machine, NAME=AMOUNT; may be given several times."
    )
    tool_parser: str = setting(
        "auto", "How tool calls are read; auto finds it in the chat template, off turns them off."
    )
    reasoning_parser: str = setting(
        "auto", "How reasoning is told from the answer; auto finds it in the chat template."
    )
    chat_template: str | None = setting(None, "A file with a chat template instead of the checkpoint's.")
    otlp_traces_endpoint: str | None = setting(
        None, "A collector that is told of each request by OTLP over HTTP, such as http://127.0.0.1:4318."
    )
    log_file: str | None = setting(None, "Where to log; left out, the error stream.")
    log_level: str = setting("info", "debug, info, warning or error.")
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        check_range(self)
        for name in (item.name for item in settings_of(ServerConfig).values() if item.kind == "float"):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name != "drain_timeout"):
                raise ConfigError(f"{name} is {value}", wanted="a number of seconds above 0", remedy=f"correct {name}")
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}", wanted="a number from 0 to 65535", remedy="correct port")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_keyfile_password):
            raise ConfigError("found a flag of TLS without a certificate", wanted="ssl_certfile", remedy="give one")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}", wanted=f"one of {', '.join(LOG_LEVELS)}")
        for place, key in enumerate(self.api_key, 1):
            _check_key(key, f"key {place} of api_key")
        for each in self.replica_env:
            _check_variable(each)
        for each in self.ray_resources:
            _resource(each)

    def variables_of(self, replica: int) -> dict[str, str]:
        """The variables of one replica's process besides those of this one."""
        pairs = (each.partition("=") for each in self.replica_env)
        return {name: value.replace("{index}", str(replica)) for name, _, value in pairs}

    @property
    def resources(self) -> dict[str, float]:
        """What each replica takes of a cluster, by Ray's names."""
        return dict(_resource(each) for each in self.ray_resources)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: str) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and lines that begin with `#` are none. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"api_key_file {path} can not be read: {reason}", remedy="correct api_key_file") from None
    keys = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
    for number, key in keys.items():
        _check_key(key, f"line {number} of {path}")
    if not keys:
        raise ConfigError(f"api_key_file {path} has no key", wanted="one key a line", remedy="add one, or leave it out")
    return tuple(keys.values())


def _check_key(key: str, where: str) -> None:
    """A header can carry the key; the error does not repeat it."""
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(f"{where} is not a key", wanted="printable ASCII without spaces", remedy="replace it")


def _check_variable(text: str) -> None:
    """A setting of ours is refused: an engine process gets its settings by value and would not read it."""
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
    """Name and amount of what a replica takes of a cluster."""
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
