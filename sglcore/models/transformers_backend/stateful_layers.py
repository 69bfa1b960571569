"""Layers of transformers' classes that keep a state for each request (convolution, recurrence):
those that store it through transformers' cache interface.

Such a module stays in the model; its `forward` becomes `Mixer.forward`. A step runs it once for
each request with the state of the request's slot; requests with one token run in one call. The walk
on the meta device finds the shapes of the states.
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

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend.kernel_layers import PackedLinear
from sglcore.models.transformers_backend.module_probes import kind_of
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.states import StateTensor
from sglcore.runtime.state_layer import StateLayer

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
"""Methods of the cache that a module calls to store its state."""
_CLASSES = ("transformers.models.", f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")
"""Prefixes of the modules of transformers' classes, and of the classes in a checkpoint's own
code."""
_CACHES = ("cache_params", "past_key_values")
"""Names of the cache argument."""
EQUAL = 1e-3
"""The tolerance for results that are computed in another order, relative to the largest value."""
FEW, LONG = 6, 70
"""Numbers of tokens in the trials of a twin. `LONG` is more than 64, the chunk size of classes that
have no attribute for it."""
PARTS, LAST = (33, 2, 35), 9
"""`PARTS`: sizes of the parts into which the `LONG` tokens are split; no part after the first
begins at a chunk boundary. `LAST`: tokens at the end that run one by one in a module that
forgets."""
SMALL = 16
"""The greatest chunk size of a twin with an attribute for it."""
LARGE = 8.0
"""The factor by which some tokens of a trial are larger than the others."""
_CHUNKS = ("chunk_size",)
"""Attributes that hold the chunk size in tokens; any value of them is valid."""
_LAYER = frozenset({"layer_idx", "name", "_own"})
"""Attributes that only name the layer of a state or of a weight."""


class Held:
    """Stands in for transformers' cache in one call of a module: the states of some requests by
    name, [rows, ...] each. A missing name means that the requests have no state yet. The layer's
    index is not read."""

    def __init__(self, states: dict[str, Tensor]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution; None without a state."""
        return self.states.get(f"conv{state_idx}")

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Append `new` [rows, channels, T] to the convolution's last inputs and return both, padded
        with zeros on the left to `conv_kernel_size` (None: to the T of the last inputs, or of `new`
        without any). Keeps that many at the end as the next state.
        """
        before = self.get_conv_state(layer_idx, state_idx)
        full = new if before is None else torch.cat([before, new], dim=-1)
        size = conv_kernel_size or (new if before is None else before).shape[-1]
        full = pad(full, (max(0, size - full.shape[-1]), 0))
        self.states[f"conv{state_idx}"] = full[..., -size:]
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the matrices of a recurrence; None without a state."""
        return self.states.get(f"recurrent{state_idx}")

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Replace the matrices of a recurrence by `state` and return it."""
        self.states[f"recurrent{state_idx}"] = state
        return state

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for `get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """MiniMax's name for `update_recurrent_state`."""
        self.update_recurrent_state(state, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: no state is ever rolled back."""
        return False


class MixerCall:
    """Callable from hidden states and the states of their requests to a module's results, by the
    module's own forward. All its other required arguments, such as masks and positions, are
    None."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        given = inspect.signature(module.forward).parameters.values()
        named = [each for each in given if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        wanted = [each.name for each in named if each.default is each.empty]
        self._cache = next(each.name for each in named if each.name in _CACHES)
        self._absent = dict.fromkeys(wanted[1:])

    def __call__(self, hidden: Tensor, states: dict[str, Tensor]) -> tuple[Any, ...]:
        """Return the module's results for `hidden` [rows, T, H]; `states` by name, [rows, ...]
        each, get their new values in place. No states: the requests begin.
        """
        found = self._forward(hidden, **{**self._absent, self._cache: Held(states)})
        return found if isinstance(found, tuple) else (found,)


class Results:
    """Packs a module's results for each token, [rows, T, *shape] each, into one matrix, and unpacks
    them. Results of other shapes are dropped: nothing needs them. `found` is what the module
    returned for `hidden` [rows, T, H]."""

    def __init__(self, hidden: Tensor, found: tuple[Any, ...]) -> None:
        shapes = [each.shape if isinstance(each, Tensor) else torch.Size() for each in found]
        self._shapes = [shape[2:] if shape[:2] == hidden.shape[:2] else None for shape in shapes]
        self._sizes = [shape.numel() for shape in self._shapes if shape is not None]
        self.width = max(hidden.shape[2], sum(self._sizes))
        """Numbers in a row of the module's hidden states or of its results, whichever has more."""

    def pack(self, found: tuple[Any, ...]) -> Tensor:
        """Return results as [rows * T, width]."""
        parts = [
            each.unsqueeze(-1).flatten(2) for each, shape in zip(found, self._shapes, strict=True) if shape is not None
        ]
        return self.widen((parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).flatten(0, 1))

    def widen(self, rows: Tensor) -> Tensor:
        """[T, n] to [T, width], padded with zeros."""
        return rows if rows.shape[1] == self.width else pad(rows, (0, self.width - rows.shape[1]))

    def unpack(self, rows: Tensor) -> Any:
        """[T, width] to the module's results for one request with T tokens, as a tuple, or alone if
        there is one; None for dropped results."""
        parts = iter(rows[:, : sum(self._sizes)].split(self._sizes, dim=1))
        found = tuple(
            None if shape is None else next(parts).reshape(1, rows.shape[0], *shape) for shape in self._shapes
        )
        return found if len(found) > 1 else next(iter(found))


class Mixer(StateLayer):
    """A state layer that runs a module of transformers. `kept`, the shapes of its states, is empty
    before the walk on the meta device (`shape_walk.walk`). `forgets`: a call with several tokens
    ignores the state that it is given, so tokens after a prefix run one by one."""

    def __init__(self, layer_id: int, module: nn.Module) -> None:
        super().__init__(layer_id, {})
        self.module = module
        self.forgets = False
        self.size = 0
        self._call = MixerCall(module)
        self._results: Results | None = None
        module.forward = self.forward

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Replace the module's forward: `hidden_states` [1, T, H] to the module's results, as
        `Results.unpack` returns them. Positions do not matter to the module, and masks only hide
        padding, which does not occur.
        """
        if hidden_states.device.type == "meta":
            return self._walk(hidden_states)
        results = self._results
        assert results is not None
        return results.unpack(self(results.widen(hidden_states[0])))

    @property
    def remark(self) -> str:
        """For the log: that the module forgets. Empty if it does not."""
        if not self.forgets:
            return ""
        return (
            f"{type(self.module).__name__} ignores its state with several tokens: after a prefix, tokens run one by one"
        )

    def results(self, found: tuple[Any, ...]) -> Tensor:
        """Pack the module's results as [rows * T, width]."""
        assert self._results is not None
        return self._results.pack(found)

    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """Run the leading requests with one token in one call, the others one by one. Takes and
        returns [T, width]; hidden states and results are padded to the wider of the two. Raises
        ValueError if the host does not know the lengths."""
        hidden, slots = hidden[:, : self.size], batch.req_pool_indices
        if batch.forward_mode.is_decode:
            return self._advance(hidden[:, None], slots, states)
        if batch.extend_seq_lens_cpu is None or batch.extend_prefix_lens_cpu is None:
            raise ValueError("found a batch with lengths that the host does not know; wanted extend_seq_lens_cpu")
        lengths, before = batch.extend_seq_lens_cpu.tolist(), batch.extend_prefix_lens_cpu.tolist()
        count = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
        rows = hidden[count:].split(lengths[count:])
        parts = [self._advance(hidden[:count, None], slots[:count], states)] if count else []
        for row, tokens in enumerate(rows, count):
            pieces = tokens.split(1) if self.forgets and before[row] else (tokens,)
            parts += [self._advance(piece[None], slots[row : row + 1], states) for piece in pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _advance(self, hidden: Tensor, slots: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Run `hidden` [rows, T, H] with the states of `slots` and write them back. Returns [rows *
        T, width]."""
        held = {name: state.index_select(0, slots) for name, state in states.items()}
        mixed = self.results(self._call(hidden, held))
        for name, state in states.items():
            state[slots] = held[name].to(state.dtype)
        return mixed

    def _walk(self, hidden: Tensor) -> Any:
        """Record the shapes of the states, from a prompt and one token after it. Raises
        `ConfigError` if they depend on the number of tokens."""
        held: dict[str, Tensor] = {}
        found = self._call(hidden, held)
        kept = {name: StateTensor(tuple(state.shape[1:]), state.dtype) for name, state in held.items()}
        self._call(hidden[:, :1], held)
        self.size = hidden.shape[2]
        if self.kept and kept != self.kept:
            raise _refusal(self.module, f"it keeps {kept} for {hidden.shape[1]} tokens, and {self.kept} for fewer")
        self.kept, self._results = kept, Results(hidden, found)
        return self._results.unpack(self._results.pack(found))


def find_mixers(model: PreTrainedModel) -> tuple[Mixer, ...]:
    """Return a `Mixer` for every module that stores a state in transformers' cache; its `forward`
    is replaced. The walk finds the shapes of the states."""
    modules = list(model.modules())
    names = names_by_kind(modules)
    return tuple(
        Mixer(number, module) for number, module in enumerate(each for each in modules if _UPDATES & names[type(each)])
    )


def names_by_kind(modules: Iterable[nn.Module]) -> dict[type[nn.Module], set[str]]:
    """Return `names_in` by class of the modules."""
    return {kind: names_in(kind) for kind in set(map(type, modules))}


def names_in(kind: type[nn.Module]) -> set[str]:
    """Return the global and attribute names that the code of a model's class uses, with that of its
    base classes in transformers.
    """
    own = [each for each in kind.__mro__ if each.__module__.startswith(_CLASSES)]
    functions = [inspect.unwrap(each) for one in own for each in vars(one).values() if inspect.isfunction(each)]
    return {name for function in functions for name in function.__code__.co_names}


def check_mixers(mixers: tuple[Mixer, ...]) -> None:
    """Set `forgets` of each mixer, once buffers have their values. Raises `ConfigError` for a mixer
    with states that do not represent the tokens before.

    Tests a twin with random weights for each kind (class, attributes and shapes, in whatever
    layer). Run on `LONG` tokens, more than one chunk, without a state, it must give the same as
    from zero states in `PARTS`, or, if it forgets, with the last tokens one by one. For the first
    `FEW` tokens it must give the same one by one, and with two requests in one call. Some tokens
    are large, so that clamps show.
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
    """Return a key that is equal for mixers with equivalent twins."""
    return kind_of(mixer.module, _LAYER), mixer.size, tuple(sorted(mixer.kept.items()))


def _forgets(mixer: Mixer) -> bool:
    """Whether a call with several tokens ignores the state. Raises `ConfigError` as
    `check_mixers`."""
    twin, hidden = _Twin(mixer), torch.randn(1, LONG, mixer.size)
    hidden[:, ::3] *= LARGE
    whole, few = twin(hidden, [LONG], {}), hidden[:, :FEW]
    if not _is_same(twin(few, [1] * FEW), whole):
        if not _is_same(twin(few, [FEW]), whole):
            raise _refusal(mixer.module, "its initial state is not zero")
        raise _refusal(mixer.module, "its results token by token differ from the results of one call")
    if not _is_same(twin.side_by_side(few), torch.stack((whole[1], whole[0]))):
        raise _refusal(mixer.module, "its results for a request depend on other requests of the step")
    if _is_same(twin(hidden, PARTS), whole):
        return False
    if not _is_same(twin(hidden, [LONG - LAST, *[1] * LAST]), whole):
        raise _refusal(mixer.module, f"its results for {LONG} tokens in parts differ from the results of one call")
    return True


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    """Whether `found` [T, width] equals the first T rows of `wanted` within `EQUAL`."""
    wanted = wanted[: len(found)]
    return float((found - wanted).abs().max()) <= EQUAL * float(wanted.abs().max())


class _Twin:
    """A mixer's module on the host in float32, with random weights, its own buffers, its class's
    forward, and chunks small enough that `LONG` tokens are several."""

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
        """Return its results [T, width] for `hidden` [1, T, H], run in parts of `sizes` tokens,
        from `states` (None: zeros)."""
        states = self._zeros(1) if states is None else states
        return torch.cat([self._mixer.results(self._call(part, states)) for part in hidden.split([*sizes], dim=1)])

    def side_by_side(self, hidden: Tensor) -> Tensor:
        """Run two requests with one token each in one call; returns [2, width]. The first has
        hidden[:, 1] after hidden[:, 0], the second has hidden[:, 0] alone."""
        one = self._zeros(1)
        self._call(hidden[:, :1], one)
        states = {name: torch.cat((one[name], zeros)) for name, zeros in self._zeros(1).items()}
        return self._mixer.results(self._call(torch.cat((hidden[:, 1:2], hidden[:, :1])), states))


class _Thin(nn.Module):
    """Replaces a linear layer in a twin: each output is one input times one weight, so that large
    layers cost little."""

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
    """Return random weights of this shape that keep the scale of values."""
    return torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)


def _refusal(module: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} cannot be served by transformers' classes: {what}", remedy="use another model"
    )
