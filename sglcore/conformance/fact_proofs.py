"""For each fact of a device: the module of the core that reads it, the law that finds a false one,
and a mutant with a false one.

A fact without a proof here, or a proof without its reader, law or mutant, fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sglcore.conformance.mutant import Mutant
from sglcore.conformance.mutants import mutants_facts as lies
from sglcore.conformance.mutants import mutants_package as wrong


@dataclass(frozen=True, slots=True)
class Proof:
    """How one fact of a device is tested. `reader`: the module of the core that reads the fact;
    `law`: the name of a law that finds a false value; `mutant`: a device with a false value, which
    this law must catch.
    """

    reader: str
    law: str
    mutant: Mutant


PROOFS: Mapping[str, Proof] = MappingProxyType(
    {
        "tensor_device": Proof("sglcore.runtime.bring_up", "facts_agree", wrong.UNKNOWN_DEVICE),
        "index_dtype": Proof("sglcore.runtime.registry_builders", "integers_are_narrow", lies.WIDENS_IDS),
        "dtypes": Proof("sglcore.checkpoint.dtype", "computes_in", lies.COARSE),
        "preferred_dtype": Proof("sglcore.checkpoint.dtype", "facts_agree", wrong.PREFERS_OTHER),
        "page_size": Proof("sglcore.runtime.bring_up", "facts_agree", wrong.NO_PAGES),
        "needs_host_lengths": Proof("sglcore.runtime.bring_up", "attention_is_reference", lies.READS_LENGTHS),
        "allows_mixed_batches": Proof("sglcore.runtime.bring_up", "joins_and_leaves", lies.REFUSES_MIXED),
        "has_streams": Proof("sglcore.runtime.streams", "facts_agree", wrong.HOST_STREAMS),
        "has_pinned_memory": Proof("sglcore.runtime.registry_builders", "copies_are_ordered", lies.LATE_COPIES),
        "reaches_pinned_memory": Proof(
            "sglcore.runtime.hisparse.hisparse_bring_up", "kernels_reach_the_host", lies.READS_A_COPY
        ),
        "shares_host_memory": Proof("sglcore.runtime.registry_builders", "facts_agree", wrong.HOST_APART),
        "default_graph": Proof("sglcore.runtime.graphs.graph_choice", "facts_agree", wrong.NO_SUCH_GRAPH),
        "most_graph_segments": Proof("sglcore.runtime.graphs.graph_choice", "facts_agree", wrong.NO_SEGMENTS),
    }
)
