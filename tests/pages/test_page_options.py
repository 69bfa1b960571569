"""Options that cannot be combined are refused by name before anything is loaded; and layouts are
compared when two engines connect."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.engine.disaggregation.disaggregation_start import PageOptions, check_worker, options_of, settled
from sglcore.worker.model_worker import Limits
from tests import latent
from tests.checkpoints import llama, mistral, qwen3_next, save
from tests.pages.pair import HERE, Pair, Single
from tests.schedule.fake_worker import make_limits

PROMPT = PageOptions("prompt", address="127.0.0.1:9000")
DECODE = PageOptions("decode", ("one:9000",))


@pytest.mark.parametrize("options", [PROMPT, DECODE])
@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", 2), ("speculative", "ngram"), ("draft_model", "x"), ("hisparse", "on"), ("task", "embed")],
)
def test_what_does_not_combine_is_refused_by_name(options: PageOptions, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"role is '{options.role}' and {name} is {value!r}"):
        settled(EngineConfig(**{name: value}), options)


WRONG = {
    "role is 'prefill'": PageOptions("prefill"),
    "peers are none": PageOptions("decode"),
    "peers are one:1": PageOptions("both", ("one:1",)),
    "pages_address is none": PageOptions("prompt"),
    "pages_address is a:1": PageOptions("decode", ("one:1",), "a:1"),
    "found 'one'": PageOptions("decode", ("one",)),
    "found 'one:70000'": PageOptions("decode", ("one:70000",)),
    "found 'one:65536'": PageOptions("decode", ("one:65536",)),
    "found ':9000'": PageOptions("prompt", address=":9000", secret="s"),
    "found 'one:x'": PageOptions("decode", ("two:1", "one:x")),
    "there is no pages_secret": PageOptions("prompt", address="0.0.0.0:9000"),
    r"pages_address is \[::\]:9000, which other machines can reach": PageOptions("prompt", address="[::]:9000"),
}


@pytest.mark.parametrize("found", WRONG)
def test_a_wrong_part_is_told(found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        settled(EngineConfig(), WRONG[found])


@pytest.mark.parametrize(
    "options",
    [
        *(PageOptions("prompt", address=f"{host}:9000") for host in ("127.0.0.1", "localhost", "[::1]", "127.9.9.9")),
        *(PageOptions("prompt", address=f"{host}:65535", secret="s") for host in ("0.0.0.0", "[::]", "some.host")),
        PageOptions("decode", ("one:0", "[fd00::1]:65535")),
    ],
    ids=str,
)
def test_addresses_that_only_this_machine_reaches_need_no_secret(options: PageOptions) -> None:
    assert settled(EngineConfig(), options).speculative == "off"


LIMITS = make_limits(takes_masks=True)
UNSENT: dict[str, Limits] = {
    "it generates no text": replace(LIMITS, generates=False),
    "its layers keep a state of each request": replace(LIMITS, keeps_state=True),
    "its sliding-window layers keep separate pages": replace(LIMITS, num_window_pages=1),
    "its pages depend on later tokens": replace(LIMITS, lookahead=1),
    "its embeddings depend on earlier tokens": replace(LIMITS, reads_history=True),
    "its device cannot export pages": LIMITS,
    "": LIMITS,
}


@pytest.mark.parametrize("why", UNSENT)
def test_a_worker_whose_pages_can_not_be_sent_says_why(why: str) -> None:
    memory = object()
    worker = SimpleNamespace(limits=UNSENT[why], page_memory=lambda: None if "export" in why else memory)
    started: Any = SimpleNamespace(worker=worker)
    if not why:
        assert check_worker(started) is memory
        return
    with pytest.raises(ConfigError, match=f"cannot be sent to another engine: .*{why}"):
        check_worker(started)


def test_a_worker_that_knows_nothing_of_pages_can_not_send_any() -> None:
    started: Any = SimpleNamespace(worker=SimpleNamespace(limits=LIMITS))
    with pytest.raises(ConfigError, match="its device cannot export pages"):
        check_worker(started)


def test_nothing_is_proposed_where_prompts_come_from_elsewhere_and_all_else_stays() -> None:
    config = EngineConfig(speculative="auto", page_size=8)
    assert settled(config, DECODE) == EngineConfig(speculative="off", page_size=8)
    assert settled(config, PageOptions()) is config


def test_replicas_of_a_server_listen_one_port_further_each() -> None:
    server = ServerConfig(role="prompt", pages_address="h:9000", pages_secret="s")
    assert options_of(server, 2) == PageOptions("prompt", (), "h:9002", "s")
    assert options_of(ServerConfig(role="prompt", pages_address="h:0"), 2).address == "h:0"
    assert options_of(ServerConfig(role="decode", peers=("a:1, b:2", "c:3"))).peers == ("a:1", "b:2", "c:3")
    assert options_of(ServerConfig()) == PageOptions()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(max_position_embeddings=128), tmp_path_factory.mktemp("llama"))


def test_engines_with_other_pages_do_not_meet_and_both_layouts_are_told(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Pair(folder, prompt={"page_size": 8})
    assert "page_size 8" in str(caught.value)
    assert "page_size 4" in str(caught.value)


def test_engines_with_other_weights_of_the_same_shapes_do_not_meet(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (weights,) = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    prompt = Single(folder, PageOptions("prompt", address=HERE))
    with pytest.raises(ConfigError, match="model [0-9a-f]{12}; .* there .*model [0-9a-f]{12}; "):
        Single(other, PageOptions("decode", (prompt.transfer.address,)))
    prompt.engine.close()


KEPT = {
    "other data than KV pages": latent.deepseek_v2,
    "a state of each request": qwen3_next,
    "sliding-window layers keep separate pages": lambda: mistral(max_position_embeddings=512, sliding_window=20),
}


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("options", [PageOptions("prompt", address=HERE), PageOptions("decode", ("127.0.0.1:1",))])
def test_models_that_keep_more_than_keys_and_values_are_refused(
    what: str, options: PageOptions, tmp_path: Path
) -> None:
    folder = save(KEPT[what](), tmp_path)
    with pytest.raises(ConfigError, match=f"pages of this model cannot be sent to another engine: its .*{what}"):
        Single(folder, options)
