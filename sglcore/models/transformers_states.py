"""Layers of transformers' classes that keep a state of each request: those that take one from transformers' cache interface.

Such a module keeps its place in the model. Its calls come here, and it is run on the rows of one request after the other, each
with the state of its slot; rows of one token side by side. The walk on shapes alone tells what it keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from sglcore.device.errors import ConfigError
from sglcore.models.transformers_layers import PackedLinear
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.states import StateTensor
from sglcore.runtime.state_layer import StateLayer

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
"""What a module calls to leave its state."""
_CLASSES = ("transformers.models.", f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")
"""Where transformers' classes are, and those of a checkpoint's own code."""
_CACHES = ("cache_params", "past_key_values")
"""What it calls the cache."""
EQUAL = 1e-3
"""The greatest difference, relative to the largest value, of what is computed in another order."""


class Held:
    """Some rows' states as transformers' cache interface has them, by name [rows, ...]; absent ones are of rows that begin."""

    def __init__(self, states: dict[str, Tensor]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The tail of a convolution."""
        return self.states.get(f"conv{state_idx}")

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """The tail with new [rows, channels, T] behind it; its end is the next tail."""
        before = self.get_conv_state(layer_idx, state_idx)
        full = new if before is None else torch.cat([before, new], dim=-1)
        size = conv_kernel_size or (new if before is None else before).shape[-1]
        full = pad(full, (max(0, size - full.shape[-1]), 0))
        self.states[f"conv{state_idx}"] = full[..., -size:]
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The matrices of a recurrence."""
        return self.states.get(f"recurrent{state_idx}")

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Instead of those before."""
        self.states[f"recurrent{state_idx}"] = state
        return state

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The same by MiniMax's own name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """The same by MiniMax's own name."""
        self.update_recurrent_state(state, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """No state is ever taken back."""
        return False


class MixerCall:
    """A module's own forward. What it wants beside hidden states and the cache it gets none of: masks, and where tokens
    stand."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        given = inspect.signature(module.forward).parameters.values()
        wanted = [each.name for each in given if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
        self._cache = next(each.name for each in given if each.name in _CACHES)
        self._absent = dict.fromkeys(wanted[1:])

    def __call__(self, hidden: Tensor, states: dict[str, Tensor]) -> tuple[Any, ...]:
        """What it gives of hidden [rows, T, H] from `states`, which become those after it."""
        found = self._forward(hidden, **{**self._absent, self._cache: Held(states)})
        return found if isinstance(found, tuple) else (found,)


class Results:
    """What a module gives of each token, [rows, T, *shape] each, as rows of numbers side by side; beside it, what nobody
    needs. `found` is what it gave of hidden [rows, T, H]."""

    def __init__(self, hidden: Tensor, found: tuple[Any, ...]) -> None:
        shapes = [each.shape if isinstance(each, Tensor) else torch.Size() for each in found]
        self._shapes = [shape[2:] if shape[:2] == hidden.shape[:2] else None for shape in shapes]
        self._sizes = [shape.numel() for shape in self._shapes if shape is not None]
        self.width = max(hidden.shape[2], sum(self._sizes))
        """Numbers in a row of the module's hidden states or of its results, whichever are more."""

    def pack(self, found: tuple[Any, ...]) -> Tensor:
        """To [rows * T, width]."""
        parts = [each.flatten(2) for each, shape in zip(found, self._shapes, strict=True) if shape is not None]
        return self.widen((parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).flatten(0, 1))

    def widen(self, rows: Tensor) -> Tensor:
        """[T, n] to [T, width], with zeros behind."""
        return rows if rows.shape[1] == self.width else pad(rows, (0, self.width - rows.shape[1]))

    def unpack(self, rows: Tensor) -> Any:
        """[T, width] to what the module gives of one row of T tokens; None instead of what nobody needs."""
        parts = iter(rows[:, : sum(self._sizes)].split(self._sizes, dim=1))
        found = tuple(
            None if shape is None else next(parts).reshape(1, rows.shape[0], *shape) for shape in self._shapes
        )
        return found if len(found) > 1 else next(iter(found))


class Mixer(StateLayer):
    """One such module. Before the walk it keeps nothing.
    `forgets`: with several tokens it begins with no state, whatever it is given; later tokens then come one by one."""

    def __init__(self, layer_id: int, module: nn.Module) -> None:
        super().__init__(layer_id, {})
        self.module = module
        self.forgets = False
        self.size = 0
        self._call = MixerCall(module)
        self._results: Results | None = None
        module.forward = self.forward

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """What the module is called with by its layer, [1, T, H]; where tokens stand is nothing to it, and masks are for
        padding, of which there is none."""
        if hidden_states.device.type == "meta":
            return self._walk(hidden_states)
        results = self._results
        assert results is not None
        return results.unpack(self(results.widen(hidden_states[0])))

    @property
    def remark(self) -> str:
        """That it forgets."""
        if not self.forgets:
            return ""
        return f"with several tokens {type(self.module).__name__} begins anew: behind a prefix they come one by one"

    def results(self, found: tuple[Any, ...]) -> Tensor:
        """What the module gave, [rows * T, width]."""
        assert self._results is not None
        return self._results.pack(found)

    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """Leading rows of one token at once, longer rows one after the other. Hidden states, and what it gives, are as wide as
        whichever has more numbers."""
        hidden, slots = hidden[:, : self.size], batch.req_pool_indices
        if batch.forward_mode.is_decode:
            return self._advance(hidden[:, None], slots, states)
        if batch.extend_seq_lens_cpu is None or batch.extend_prefix_lens_cpu is None:
            raise ValueError("found a batch whose lengths the host does not know; wanted extend_seq_lens_cpu")
        lengths, before = batch.extend_seq_lens_cpu.tolist(), batch.extend_prefix_lens_cpu.tolist()
        count = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
        rows = hidden[count:].split(lengths[count:])
        parts = [self._advance(hidden[:count, None], slots[:count], states)] if count else []
        for row, tokens in enumerate(rows, count):
            pieces = tokens.split(1) if self.forgets and before[row] else (tokens,)
            parts += [self._advance(piece[None], slots[row : row + 1], states) for piece in pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _advance(self, hidden: Tensor, slots: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """hidden [rows, T, H] with the states of its slots, to [rows * T, width]; the states are written back."""
        held = {name: state.index_select(0, slots) for name, state in states.items()}
        mixed = self.results(self._call(hidden, held))
        for name, state in states.items():
            state[slots] = held[name].to(state.dtype)
        return mixed

    def _walk(self, hidden: Tensor) -> Any:
        """Write down what it keeps, by a prompt and a token after it. Raises `ConfigError` if it keeps another state after
        another number of tokens."""
        held: dict[str, Tensor] = {}
        found = self._call(hidden, held)
        kept = {name: StateTensor(tuple(state.shape[1:]), state.dtype) for name, state in held.items()}
        self._call(hidden[:, :1], held)
        self.size = hidden.shape[2]
        if self.kept and kept != self.kept:
            raise _refusal(self.module, f"it keeps {kept} of {hidden.shape[1]} tokens, and {self.kept} of fewer")
        self.kept, self._results = kept, Results(hidden, found)
        return self._results.unpack(self._results.pack(found))


def find_mixers(model: PreTrainedModel) -> tuple[Mixer, ...]:
    """Every module that leaves a state in transformers' cache, taken over. What they keep shows in the walk."""
    modules = list(model.modules())
    names = names_by_kind(modules)
    return tuple(
        Mixer(number, module) for number, module in enumerate(each for each in modules if _UPDATES & names[type(each)])
    )


def names_by_kind(modules: Iterable[nn.Module]) -> dict[type[nn.Module], set[str]]:
    """`names_in` of the class of each module."""
    return {kind: names_in(kind) for kind in set(map(type, modules))}


def names_in(kind: type[nn.Module]) -> set[str]:
    """The names that the code of a model's class has."""
    own = [each for each in kind.__mro__ if each.__module__.startswith(_CLASSES)]
    functions = [inspect.unwrap(each) for one in own for each in vars(one).values() if inspect.isfunction(each)]
    return {name for function in functions for name in function.__code__.co_names}


def check_mixers(mixers: tuple[Mixer, ...]) -> None:
    """Find those that forget, by a twin of each class with random weights, once buffers have their values. Raises
    `ConfigError` for one that token by token does not give what it gives at once."""
    if not mixers:
        return
    kinds = {type(mixer.module): mixer for mixer in mixers}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        forgets = {kind: _forgets(mixer) for kind, mixer in kinds.items()}
    for mixer in mixers:
        mixer.forgets = forgets[type(mixer.module)]


def _forgets(mixer: Mixer) -> bool:
    twin = _twin(mixer.module)
    hidden = torch.randn(1, 6, mixer.size)
    whole = _in_parts(twin, mixer, hidden, 6)

    def differs(size: int) -> bool:
        found = _in_parts(twin, mixer, hidden, size)
        return not float((found - whole).abs().max()) <= EQUAL * float(whole.abs().max())

    if differs(1):
        raise _refusal(mixer.module, "token by token it does not give what it gives at once")
    return differs(4)


def _in_parts(twin: nn.Module, mixer: Mixer, hidden: Tensor, size: int) -> Tensor:
    """Its results [T, width], so many tokens at a time, from a state of zeros."""
    call, states = MixerCall(twin), {name: torch.zeros(1, *kept.shape) for name, kept in mixer.kept.items()}
    return torch.cat([mixer.results(call(part, states)) for part in hidden.split(size, dim=1)])


def _twin(module: nn.Module) -> nn.Module:
    """The same module on the host, with random weights in float32, its own buffers, and a forward of its own."""
    copies: dict[int, Any] = {id(each): nn.Parameter(_random(each.shape)) for each in module.parameters()}
    copies |= {id(each): _like(each.own) for each in module.modules() if isinstance(each, PackedLinear)}
    copies |= {id(each): each.cpu().float() if each.is_floating_point() else each.cpu() for each in module.buffers()}
    twin = deepcopy(module, copies)
    del twin.forward
    return twin


def _like(linear: nn.Linear) -> nn.Linear:
    made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    for parameter in made.parameters():
        parameter.data = _random(parameter.shape)
    return made


def _random(shape: torch.Size) -> Tensor:
    """Weights that leave values about as large as they were."""
    return torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)


def _refusal(module: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} can not be served by transformers' classes: {what}", remedy="use another model"
    )
