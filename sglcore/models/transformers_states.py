"""Layers of transformers' classes that keep a state of each request: those that take one from
transformers' cache interface.

Such a module keeps its place in the model. Its calls come here, and it is run on the rows of one
request after the other, each with the state of its slot; rows of one token side by side. The walk
on shapes alone tells what it keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from sglcore.device.errors import ConfigError
from sglcore.models.transformers_layers import PackedLinear
from sglcore.models.transformers_twins import kind_of
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
FEW, LONG = 6, 70
"""Tokens that a twin is tried with. Chunks that no attribute tells have 64."""
PARTS, LAST = (33, 2, 35), 9
"""Parts of the `LONG` tokens, and how many come one by one of who forgets: none begins where a
chunk does."""
SMALL = 16
"""The most tokens of a chunk that an attribute tells, in a twin."""
LARGE = 8.0
"""How much larger than others some tokens are."""
_CHUNKS = ("chunk_size",)
"""Attributes that tell a chunk's tokens and may be any number."""
_LAYER = frozenset({"layer_idx", "name", "_own"})
"""Attributes that only say to which layer a state or a weight belongs."""


class Held:
    """Some rows' states as transformers' cache interface has them, by name [rows, ...]; absent ones
    are of rows that begin."""

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
    """A module's own forward. What it wants beside hidden states and the cache it gets none of:
    masks, and where tokens stand."""

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
    """What a module gives of each token, [rows, T, *shape] each, as rows of numbers side by side;
    beside it, what nobody needs. `found` is what it gave of hidden [rows, T, H]."""

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
        """[T, width] to what the module gives of one row of T tokens; None instead of what nobody
        needs."""
        parts = iter(rows[:, : sum(self._sizes)].split(self._sizes, dim=1))
        found = tuple(
            None if shape is None else next(parts).reshape(1, rows.shape[0], *shape) for shape in self._shapes
        )
        return found if len(found) > 1 else next(iter(found))


class Mixer(StateLayer):
    """One such module. Before the walk it keeps nothing. `forgets`: with several tokens it begins
    with no state, whatever it is given; later tokens then come one by one."""

    def __init__(self, layer_id: int, module: nn.Module) -> None:
        super().__init__(layer_id, {})
        self.module = module
        self.forgets = False
        self.size = 0
        self._call = MixerCall(module)
        self._results: Results | None = None
        module.forward = self.forward

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """What the module is called with by its layer, [1, T, H]; where tokens stand is nothing to
        it, and masks are for padding, of which there is none."""
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
        """Leading rows of one token at once, longer rows one after the other. Hidden states, and
        what it gives, are as wide as whichever has more numbers."""
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
        """hidden [rows, T, H] with the states of its slots, to [rows * T, width]; the states are
        written back."""
        held = {name: state.index_select(0, slots) for name, state in states.items()}
        mixed = self.results(self._call(hidden, held))
        for name, state in states.items():
            state[slots] = held[name].to(state.dtype)
        return mixed

    def _walk(self, hidden: Tensor) -> Any:
        """Write down what it keeps, by a prompt and a token after it. Raises `ConfigError` if it
        keeps another state after another number of tokens."""
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
    """Every module that leaves a state in transformers' cache, taken over. What they keep shows in
    the walk."""
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
    """Find those that forget, once buffers have their values. Raises `ConfigError` for one whose
    states do not stand for the tokens before.

    The evidence is a twin with random weights of every kind: a class, its numbers and its shapes,
    whatever its layer. `LONG` tokens from no state, more than a chunk of its own, are the same from
    zeros in `PARTS`, or one by one at the end where it forgets. The first `FEW` are the same one by
    one and in rows side by side. Some tokens are large, so that limits show.
    """
    kinds: dict[object, bool] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for mixer in mixers:
            kind = _kind(mixer)
            if kind not in kinds:
                kinds[kind] = _forgets(mixer)
            mixer.forgets = kinds[kind]


def _kind(mixer: Mixer) -> object:
    """Mixers of one kind have twins that do the same."""
    return kind_of(mixer.module, _LAYER), mixer.size, tuple(sorted(mixer.kept.items()))


def _forgets(mixer: Mixer) -> bool:
    """Whether a second part of several tokens begins anew."""
    twin, hidden = _Twin(mixer), torch.randn(1, LONG, mixer.size)
    hidden[:, ::3] *= LARGE
    whole, few = twin(hidden, [LONG], {}), hidden[:, :FEW]
    if not _is_same(twin(few, [1] * FEW), whole):
        if not _is_same(twin(few, [FEW]), whole):
            raise _refusal(mixer.module, "it begins with another state than zeros")
        raise _refusal(mixer.module, "token by token it does not give what it gives at once")
    if not _is_same(twin.side_by_side(few), torch.stack((whole[1], whole[0]))):
        raise _refusal(mixer.module, "what it gives of a request depends on other requests of the step")
    if _is_same(twin(hidden, PARTS), whole):
        return False
    if not _is_same(twin(hidden, [LONG - LAST, *[1] * LAST]), whole):
        raise _refusal(mixer.module, f"of {LONG} tokens it gives something else in parts than at once")
    return True


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    """[T, width], the first rows of what is wanted."""
    wanted = wanted[: len(found)]
    return float((found - wanted).abs().max()) <= EQUAL * float(wanted.abs().max())


class _Twin:
    """The module of a mixer on the host in float32, with random weights, its own buffers, a forward
    of its own, and chunks of so few tokens that `LONG` are several."""

    def __init__(self, mixer: Mixer) -> None:
        module = mixer.module
        copies: dict[int, Any] = {id(each): nn.Parameter(_random(each.shape)) for each in module.parameters()}
        copies |= {id(each): _Thin(each.own) for each in module.modules() if isinstance(each, PackedLinear)}
        copies |= {
            id(each): each.cpu().float() if each.is_floating_point() else each.cpu() for each in module.buffers()
        }
        twin = deepcopy(module, copies)
        del twin.forward
        own = vars(twin)
        own |= {name: min(own[name], SMALL) for name in _CHUNKS if type(own.get(name)) is int}
        self._call, self._mixer = MixerCall(twin), mixer

    def _zeros(self, rows: int) -> dict[str, Tensor]:
        return {name: torch.zeros(rows, *kept.shape) for name, kept in self._mixer.kept.items()}

    def __call__(self, hidden: Tensor, sizes: Sequence[int], states: dict[str, Tensor] | None = None) -> Tensor:
        """Its results [T, width] of hidden [1, T, H], in parts of so many tokens, from these states
        or zeros."""
        states = self._zeros(1) if states is None else states
        return torch.cat([self._mixer.results(self._call(part, states)) for part in hidden.split([*sizes], dim=1)])

    def side_by_side(self, hidden: Tensor) -> Tensor:
        """Its results [2, width] of two rows of one token: the second one behind the first, and the
        first one alone."""
        one = self._zeros(1)
        self._call(hidden[:, :1], one)
        states = {name: torch.cat((one[name], zeros)) for name, zeros in self._zeros(1).items()}
        return self._mixer.results(self._call(torch.cat((hidden[:, 1:2], hidden[:, :1])), states))


class _Thin(nn.Module):
    """In place of a linear layer: one weight for each number that it gives, so that its size costs
    nothing."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._inputs = torch.randint(0, linear.in_features, (linear.out_features,))
        self._weights = torch.randn(linear.out_features)
        self._bias = None if linear.bias is None else _random(linear.bias.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        made = x[..., self._inputs] * self._weights
        return made if self._bias is None else made + self._bias


def _random(shape: torch.Size) -> Tensor:
    """Weights that leave values about as large as they were."""
    return torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)


def _refusal(module: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} can not be served by transformers' classes: {what}", remedy="use another model"
    )
