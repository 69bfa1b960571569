"""Defects planted in the process of a rank, which tests must catch."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from datetime import timedelta
from typing import Any

import torch

from sglcore.checkpoint.parallel import expert_parts, parallel_roles
from sglcore.checkpoint.parallel.tensor_parallel import Shard
from sglcore.device import bring_up
from sglcore.layers.parallel import parallel_norms, parallel_vocab, tensor_parallel_layers
from sglcore.runtime import tp_worker
from sglcore.runtime.kernels import reference_kernels, reference_recurrent
from sglcore.runtime.parallel import pending_collective, process_group, rank_decided_sampling, rank_groups
from sglcore.sampling.sampler import Sampler
from sglcore_cpu import recording, shared_sums
from sglcore_cpu.native import recorder


def nothing(rank: int) -> None:
    """No defect."""


def in_double(rank: int) -> None:
    """No defect: the device also computes in float64, so that the order of sums cannot hide a
    defect."""
    from sglcore_cpu import facts as module

    own = module.facts

    def facts(index: int = 0) -> Any:
        return dataclasses.replace(own(index), dtypes=("float64", "float32"), preferred_dtype=None)

    module.facts = facts


def shifted_vocabulary(rank: int) -> None:
    """A rank's part of the vocabulary starts one row too late."""
    own = parallel_vocab.SharedEmbedding.__init__

    def init(self: Any, embedding: Any, part: tuple[int, int], ranks: Any) -> None:
        own(self, embedding, (part[0] + 1, part[1] + 1), ranks)

    changed: Any = parallel_vocab.SharedEmbedding
    changed.__init__ = init


def heads_in_turn(rank: int) -> None:
    """Heads of keys are dealt out round-robin instead of in runs."""
    in_runs = Shard.kv_heads

    def kv_heads(self: Shard, heads: int) -> tuple[int, int]:
        first, last = in_runs(self, heads)
        first = self.rank % heads if last - first == 1 else first
        return first, first + max(heads // self.size, 1)

    Shard.kv_heads = kv_heads


def bias_on_every_rank(rank: int) -> None:
    """A bias after an all-reduce is added once per rank."""
    tensor_parallel_layers.bias_once = lambda scope, linear, ranks: None


def padding_columns(rank: int) -> None:
    """Columns after the vocabulary's end stay among the logits, with large values."""

    def call(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        whole = torch.cat(tuple(self._group.all_gather(self._own(hidden).contiguous())), dim=-1)
        whole[:, self._vocab_size :] = 100.0
        return whole

    parallel_vocab.SharedHead.__call__ = call


def noisy_draws(rank: int) -> None:
    """Every rank samples for itself from logits that differ a little, as on different chips."""

    def sample(self: Any, logits: torch.Tensor, state: Any) -> Any:
        generator = torch.Generator().manual_seed(rank)
        noise = torch.randn(logits.shape, generator=generator) * (0.5 if rank else 0.0)
        return Sampler.sample(self, logits + noise, state)

    rank_decided_sampling.SampledByOne.sample = sample


def noisy_logits(rank: int) -> None:
    """No defect: the ranks' logits differ, and one rank decides."""
    own = parallel_vocab.SharedHead.__call__

    def call(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = own(self, hidden)
        return logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(rank)) * (
            0.5 if rank else 0.0
        )

    parallel_vocab.SharedHead.__call__ = call


def _other_logits(rank: int) -> None:
    """Rank 1 has its own logits, far from the others'."""
    own = parallel_vocab.SharedHead.__call__

    def call(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = own(self, hidden)
        return logits.roll(1, -1) if rank else logits

    parallel_vocab.SharedHead.__call__ = call


def own_proposals(rank: int) -> None:
    """Every rank draws its own draft tokens."""
    from sglcore.runtime.speculative import chain_drafts

    _other_logits(rank)
    own = chain_drafts.AutoregressiveDrafter.advance

    def advance(self: Any, rows: Any) -> torch.Tensor:
        def draw(logits: torch.Tensor, depth: int) -> torch.Tensor:
            return logits.argmax(-1).to(torch.int32)

        rows.draw = draw
        return own(self, rows)

    chain_drafts.AutoregressiveDrafter.advance = advance


def own_ranking(rank: int) -> None:
    """Every rank ranks beam candidates by itself from scores that differ a little."""

    def leaders(self: Any, logits: torch.Tensor, state: Any, count: int) -> Any:
        generator = torch.Generator().manual_seed(rank)
        noise = torch.randn(logits.shape, generator=generator) * (0.1 if rank else 0.0)
        return Sampler.leaders(self, logits + noise, state, count)

    rank_decided_sampling.SampledByOne.leaders = leaders


def own_acceptance(rank: int) -> None:
    """Every rank decides acceptance for itself."""
    _other_logits(rank)
    process_group.TIMEOUT = timedelta(seconds=2)  # ranks with different step widths wait for each other
    rank_decided_sampling.SampledByOne.decided = lambda self, *found: found


def own_history(rank: int) -> None:
    """Rank 1 proposes other n-gram draft tokens."""
    from sglcore.runtime.speculative import ngram_drafts

    own = ngram_drafts.propose
    ngram_drafts.propose = lambda known, last, *sizes: (own(known, last, *sizes) + rank) % 97


def reads_codes(rank: int) -> None:
    """No defect: kernels that take packed codes but compute with their values."""
    from sglcore.models import checkpoint
    from sglcore.models.weights.quantized_weight import QuantizedWeight

    own = checkpoint.load_model

    def pack(weight: Any) -> torch.Tensor:
        same = QuantizedWeight(weight.codes, weight.scales, weight.zeros, weight.bits, weight.group)
        return same.values(slice(None)).to(weight.dtype)

    def load(*given: Any, kernels: Any, **more: Any) -> Any:
        return own(*given, kernels=kernels.replace(mxfp4_moe=reference_kernels.mxfp4_moe, pack_quantized=pack), **more)

    checkpoint.load_model = load


def scales_of_the_first(rank: int) -> None:
    """Every rank takes the scales of the first rank's columns."""
    from sglcore.models.weights.rank_weight import CutWeight

    reads_codes(rank)
    own = CutWeight._by_group

    def of_the_first(self: Any, by_group: torch.Tensor, group: int) -> torch.Tensor:
        found = own(self, by_group, group)
        return by_group[:, : found.shape[1]] if self.cut.dim else found

    CutWeight._by_group = of_the_first


def scales_of_one_place(rank: int) -> None:
    """The scales of rows are looked up by their index in the rank's part instead of in the whole
    weight."""
    from sglcore.models.weights.quantized_weight import ScaledFloats
    from sglcore.models.weights.rank_weight import CutWeight

    own, changed = CutWeight.values, CutWeight

    def values(self: Any, rows: slice) -> torch.Tensor:
        if self.cut.dim or not isinstance(self.whole, ScaledFloats):
            return own(self, rows)
        floats = torch.cat([self.whole.floats[first:last] for first, last in self.cut.ranges])
        return dataclasses.replace(self.whole, floats=floats).values(rows)

    changed.values = values


def first_heads(rank: int) -> None:
    """Every rank takes the first heads of a weight in sections."""
    parallel_roles.Section.part = lambda self, shard: (0, self.outputs // shard.size)


def one_run(rank: int) -> None:
    """A rank takes one contiguous run over all sections instead of a run of each."""
    own = tensor_parallel_layers.kept

    def kept(divided: Any, shard: Shard) -> Any:
        sizes = [last - first for first, last in own(divided, shard)]
        return ((shard.rank * sum(sizes), (shard.rank + 1) * sum(sizes)),)

    tensor_parallel_layers.kept = kept


def own_norms(rank: int) -> None:
    """A norm covers only the rank's part of the row."""
    parallel_norms.SharedNorm.__call__ = lambda self, x: reference_kernels.rms_norm(x, self.weight, self.eps)
    shared: Any = parallel_norms.SharedGroupNorm
    shared.__call__ = lambda self, *given: reference_recurrent.gated_rms_norm(*given)


def neighbours_in_halves(rank: int) -> None:
    """Interleaved gate and up columns are cut as if the gates came first."""
    own = expert_parts.cut_clamped

    def cut_clamped(cut: Any, size: int, part: Any) -> None:
        own(cut, size, part)
        cut("experts.gate_up_proj", 2 * size, part, (part[0] + size, part[1] + size), dim=2)

    expert_parts.cut_clamped = cut_clamped


def own_memory(rank: int) -> None:
    """Each rank sizes its pools by its own memory."""
    less_memory(rank)
    process_group.Group.least = lambda self, value: value


def wrong_shard(rank: int) -> None:
    """A rank computes another shard's part of all rows."""
    changed: Any = rank_groups.Groups
    changed.shard = property(lambda self: (self.place.rank // self.attn_tp.size + 1) % self.place.topology.dp)


def sums_of_all(rank: int) -> None:
    """Attention outputs of a shard are summed over the ranks of all shards."""
    changed: Any = tensor_parallel_layers.ShardedBuild
    changed._ranks = property(lambda self: Widened(self._every))


class Widened:
    """The ranks of a shard, with an all-reduce over all ranks."""

    def __init__(self, groups: Any) -> None:
        self._groups = groups
        self.rank, self.size = groups.attn_tp.rank, groups.attn_tp.size
        self.all_gather, self.broadcast = groups.attn_tp.all_gather, groups.attn_tp.broadcast

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks as if there were one shard, with rows padded to 64."""
        rows = torch.zeros(64, *x.shape[1:], dtype=x.dtype)
        rows[: len(x)] = x
        return x.copy_(self._groups.tp.all_reduce(rows)[: len(x)])


def less_memory(rank: int) -> None:
    """No defect: memory is scarce, and rank 1 has less of it."""
    from sglcore_cpu import bring_up as module

    own = module.available_memory

    def available() -> tuple[int, str]:
        return (1 << 20 if rank else 2 << 20), own()[1]

    module.available_memory = available
    module.room = lambda config, model_path: 0


def another_order(rank: int) -> None:
    """Rank 1 gathers while the others sum."""
    if rank:
        kinds: tuple[Any, ...] = (process_group.Group, shared_sums.SharedSums)
        for kind in kinds:
            kind.all_reduce = lambda self, x: self.all_gather(x)[0]


def _in_step(name: str, rank: int, act: Any) -> None:
    """Call `act` when the bring-up step `name` of rank 1 begins."""
    own = bring_up.Step.call

    def call(self: Any, known: Any) -> Any:
        if rank == 1 and self.provides == name:
            act()
        return own(self, known)

    bring_up.Step.call = call


def dies_in(name: str, rank: int) -> None:
    """Rank 1 is killed when this bring-up step begins."""
    _in_step(name, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _no_memory() -> None:
    raise MemoryError("no room for weights")


def has_no_memory(rank: int) -> None:
    """Rank 1 runs out of memory while it loads."""
    _in_step("model", rank, _no_memory)


def raises_in_a_step(rank: int) -> None:
    """Rank 1 raises in its fifth step."""
    _in_fifth_step(rank, _raise)


def leaves_in_a_step(rank: int) -> None:
    """Rank 1 exits with code 0 in its fifth step, without a message."""
    _in_fifth_step(rank, lambda: os._exit(0))


def _raise() -> None:
    raise ValueError("the fifth step is too much")


def _in_fifth_step(rank: int, act: Any) -> None:
    own, count = tp_worker.TpModelWorker.submit, itertools.count(1)

    def submit(self: Any, batch: Any) -> Any:
        if rank == 1 and next(count) == 5:
            act()
        return own(self, batch)

    tp_worker.TpModelWorker.submit = submit


def simulated(kind: str, rank: int) -> None:
    """No defect: two simulated accelerators, as in the leader's process."""
    import sglcore_sim

    os.environ["TRITON_INTERPRET"] = "1"
    sglcore_sim.install(kind, devices=2, memory=1 << 30)


def unordered(kind: str, rank: int) -> None:
    """Sums run on a stream that does not wait for their inputs."""
    simulated(kind, rank)
    own = process_group.Group.all_reduce

    def all_reduce(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.Stream(x.device):
            return own(self, x)

    process_group.Group.all_reduce = all_reduce


def launched_unordered(kind: str, rank: int) -> None:
    """An asynchronous sum does not wait for its inputs."""
    simulated(kind, rank)
    from sglcore_sim import collectives

    collectives.Group.behind = lambda self, own, device: None


def never_awaited(kind: str, rank: int) -> None:
    """A consumer does not wait for the result of a collective."""
    simulated(kind, rank)
    from sglcore_sim import collectives

    collectives.Done.wait = lambda self, timeout=None: True


def awaited_elsewhere(kind: str, rank: int) -> None:
    """A stream other than the consumer's waits for the result."""
    simulated(kind, rank)
    from sglcore_sim import collectives

    own = collectives.Done.wait

    def wait(self: Any, timeout: Any = None) -> bool:
        if self._device is None:
            return own(self, timeout)
        with torch.Stream(self._device):
            return own(self, timeout)

    collectives.Done.wait = wait


def written_while_under_way(kind: str, rank: int) -> None:
    """The buffer of a sum is written again before the sum is awaited."""
    simulated(kind, rank)
    own = process_group.Group._run

    def run(self: Any, collective: Any, out: torch.Tensor) -> torch.Tensor:
        def started(later: bool) -> Any:
            work = collective(later)
            if work is not None:
                out.mul_(1)
            return work

        return own(self, started, out)

    process_group.Group._run = run


def freed_while_under_way(kind: str, rank: int) -> None:
    """Nothing keeps a sent tensor alive until it has arrived."""
    simulated(kind, rank)
    own = pending_collective.Launched.__init__

    def init(self: Any, work: Any, turn: Any, result: torch.Tensor, held: torch.Tensor, size: int) -> None:
        own(self, work, turn, result, result, size)

    pending_collective.Launched.__init__ = init


def sums_not_recorded(rank: int) -> None:
    """A recorded step contains no sums."""
    own = shared_sums.SharedSums.all_reduce
    shared_sums.SharedSums.all_reduce = lambda self, x: own(self, x) if recorder.get() is None else x


def sums_too_soon(rank: int) -> None:
    """A recorded sum runs before the kernels that compute its input."""

    def host(self: Any, function: Any, *arguments: Any) -> None:
        self.parts.append(recording.HostCall(function, arguments, {}, ()))

    recording.Recording.host = host
    recording.Recording.kernel = lambda self, name: None
