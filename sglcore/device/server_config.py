"""The server's configuration: what `sglcore serve` was asked for besides the engine's settings, frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType

from sglcore.device.errors import ConfigError
from sglcore.device.settings import PREFIX, require_at_least

LOG_LEVELS = ("debug", "info", "warning", "error")
_COUNTS = (
    "max_request_bytes",
    "max_header_bytes",
    "max_connections",
    "max_concurrent_requests",
    "max_prompts",
    "max_n",
    "max_prompt_tokens",
    "replicas",
)
_COUNTS_OR_NONE = ("port", "max_queued_requests", "max_logprobs", "max_stored_responses")
_SECONDS = ("header_timeout", "body_timeout", "keep_alive", "write_timeout")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What was asked of the server. Times are seconds, sizes bytes.

    `port` 0 takes any free one. `served_model_name`: the names that requests may use (none: from the model's folder).
    `api_key`: keys of which a request must bring one (none: anybody may ask); `api_key_file` has more, one a line.
    `allowed_hosts`: names besides those of this machine under which a server bound to loopback answers.
    `max_concurrent_requests` bounds the requests that are being answered, `max_queued_requests` those that wait for a
    place in a step, `max_prompts` and `max_n` one request's prompts and samples of each, `max_prompt_tokens` its prompt
    (None: the model's context). `header_timeout` and `body_timeout` are what a client has to send a request's head and
    its body, `write_timeout` what it has to take anything of an answer that is ready, `keep_alive` how long an idle
    connection stays. `drain_timeout`: how long a server that was told to stop goes on with the requests in flight.
    `restart`: start an engine again that died. `replica_env`: variables that each replica gets, `NAME=VALUE`, where
    `{index}` in VALUE is its number. `ray`: place the replicas by Ray, on the cluster at this address ("auto": this
    machine's, "local": a new one); `ray_resources`: what each takes of it, `NAME=AMOUNT`, such as CPU=4. `log_file` None
    logs to stderr. `max_stored_responses` bounds the answers that are kept for later reference.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_request_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    max_connections: int = 4096
    max_concurrent_requests: int = 1024
    max_queued_requests: int = 2048
    max_prompts: int = 1024
    max_n: int = 64
    max_logprobs: int = 20
    max_prompt_tokens: int | None = None
    max_stored_responses: int = 256
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 120.0
    keep_alive: float = 75.0
    drain_timeout: float = 30.0
    restart: bool = False
    replicas: int = 1
    replica_env: tuple[str, ...] = ()
    ray: str | None = None
    ray_resources: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    log_file: str | None = None
    log_level: str = "info"
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        require_at_least(self, 1, *_COUNTS)
        require_at_least(self, 0, *_COUNTS_OR_NONE)
        for name in (*_SECONDS, "drain_timeout"):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name in _SECONDS):
                raise ConfigError(f"{name} is {value}", wanted="a number of seconds above 0", remedy=f"correct {name}")
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}", wanted="a number from 0 to 65535", remedy="correct port")
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
