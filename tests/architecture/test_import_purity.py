"""What an import may cost and what it must not touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.models.architecture_registry import ARCHITECTURES
from tests.architecture.imports import imported, modules_of
from tests.architecture.rules import core_modules, sources, without_torch

ROOT = Path(__file__).resolve().parents[2]
HEAVY = frozenset({"torch", "numpy", "mlx", "transformers", "tokenizers", "triton", "typer", "rich"})
TENSORS = frozenset({"torch", "mlx", "triton", "transformers"})
WITHOUT_TENSORS = (
    "sglcore.sampling.params",
    "sglcore.sampling.reference_sampler",
    "sglcore.conformance.plugin",
)
"""Modules of packages that otherwise need torch; the engine or the conformance kit also loads them
with a device package without torch."""


def tree(root: Path, text: str) -> Path:
    """Make a tree with an `sglcore` that has only `__init__.py` with this text."""
    (root / "sglcore").mkdir()
    (root / "sglcore" / "__init__.py").write_text(text)
    return root


def test_importing_sglcore_loads_nothing_heavy_and_opens_no_device_node() -> None:
    seen = imported(ROOT, ["sglcore"])
    assert not seen.modules & HEAVY
    assert seen.opened == ()


def test_importing_sglcore_takes_less_than_a_tenth_of_a_second() -> None:
    assert min(imported(ROOT, ["sglcore"]).seconds for _ in range(5)) < 0.1


@pytest.mark.parametrize("part", ["device", "checkpoint", "schedule", "step", "engine"])
def test_the_seam_the_scheduler_the_host_half_and_the_engine_load_no_tensor_library(part: str) -> None:
    assert not imported(ROOT, modules_of(ROOT, f"sglcore.{part}")).modules & TENSORS


def architecture_modules() -> set[str]:
    """Every architecture's module, and the modules that they share."""
    return {
        "sglcore.models.layer_kinds",
        "sglcore.models.decoder",
        *(ref.partition(":")[0] for ref in ARCHITECTURES.values()),
    }


def test_architectures_load_no_tensor_library_and_nothing_of_torchs() -> None:
    seen = imported(ROOT, sorted(architecture_modules())).modules
    assert not seen & TENSORS
    assert not [module for module in seen if module.startswith(("sglcore.runtime", "sglcore.layers"))]


def test_architectures_import_only_what_they_share_the_checkpoint_and_errors() -> None:
    paths = [f"{module.replace('.', '/')}.py" for module in architecture_modules()]
    found = {module for source in sources(ROOT, *paths) for _, module in core_modules(source)}
    checkpoint = {
        f"sglcore.checkpoint.{name}"
        for name in (
            "compressed_config",
            "encoder_config",
            "latent_config",
            "model_config",
            "moe_spec",
            "ngram_config",
            "recurrent_config",
        )
    }
    assert found <= architecture_modules() | checkpoint | {"sglcore.core.errors"}


def test_what_a_device_without_torch_imports_of_the_core_loads_no_tensor_library() -> None:
    files = [source for package in without_torch(ROOT).values() for source in package]
    modules = {module for source in files for _, module in core_modules(source)}
    assert "sglcore.sampling.params_batch" in modules
    assert not imported(ROOT, (*WITHOUT_TENSORS, *sorted(modules))).modules & TENSORS


def test_the_declarations_of_all_device_packages_load_nothing_heavy() -> None:
    declared = [path.parent for path in sorted(ROOT.glob("devices/*/sglcore_*/__init__.py"))]
    declarations = [folder.name for folder in declared]
    seen = imported(ROOT, declarations, [folder.parent for folder in declared])
    assert declarations and not seen.modules & HEAVY and seen.opened == ()


def test_reading_the_command_line_loads_no_tensor_library_and_no_numpy() -> None:
    assert not imported(ROOT, ["sglcore.cli.app"]).modules & (HEAVY - {"typer", "rich"})


def test_doctor_needs_the_standard_library_only() -> None:
    assert not imported(ROOT, ["sglcore.cli.doctor", "sglcore.cli.__main__"]).modules & HEAVY


def test_an_import_of_numpy_is_seen(tmp_path: Path) -> None:
    assert imported(tree(tmp_path, "import numpy"), ["sglcore"]).modules & HEAVY


def test_an_open_device_node_is_seen(tmp_path: Path) -> None:
    assert imported(tree(tmp_path, "open('/dev/null').close()"), ["sglcore"]).opened == ("/dev/null",)


def test_a_slow_import_is_seen(tmp_path: Path) -> None:
    busy = "import time\nend = time.process_time() + 0.15\nwhile time.process_time() < end: pass"
    assert imported(tree(tmp_path, busy), ["sglcore"]).seconds >= 0.1


def test_the_public_classes_are_found_lazily_and_an_unknown_name_is_an_error() -> None:
    import sglcore

    with pytest.raises(AttributeError, match="it offers LLM, PromptEmbeds, SamplingParams, __version__"):
        getattr(sglcore, "Nothing")  # noqa: B009
