"""The process that checks grammars for `GrammarChecks` (`grammar_check.py`), which starts it;
`killable_checks_process.py` has its loop."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer

from sglcore.engine.process_end import leave
from sglcore.engine.structured_output.grammar_cache import GrammarBackend, open_backend
from sglcore.engine.structured_output.grammar_check import SMALLER, CheckSpec
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary, first_steps
from sglcore.engine.structured_output.killable_checks import Verdict
from sglcore.engine.structured_output.killable_checks_process import Checker, first_line
from sglcore.sampling.grammar_spec import Grammar, GrammarError


def main() -> int:
    """Check the Grammars in the CheckJobs on standard input until it ends, and write a Verdict to
    standard output for each as soon as it is known, in any order; returns the exit code. The first
    line of the input has the CheckSpec. Checks that still run at the end are killed."""
    first, rest = first_line()
    if not first:
        return 0
    spec = msgspec.json.decode(first, type=CheckSpec)
    backend = open_backend(spec.backend, Vocabulary(Tokenizer.from_str(spec.tokenizer), spec.size, spec.eos_ids))
    try:
        backend.compile(Grammar("regex", "a"))  # reads the vocabulary, once for all forks
    except GrammarError:
        pass  # each check reports the reason

    def work(text: bytes) -> Verdict:
        return _checked(backend, msgspec.json.decode(text, type=Grammar), spec.limits.mask_seconds)

    Checker(work, spec.limits, rest).run()
    return 0


def _checked(backend: GrammarBackend, grammar: Grammar, mask_seconds: float) -> Verdict:
    """Return the verdict, numbered 0, on a grammar. Its `error` says that the grammar is invalid,
    that the library failed, or that a mask takes more than `mask_seconds` of CPU time; None: it is
    valid. Raises MemoryError only."""
    error: tuple[str, str, str] | None = None
    try:
        slowest = first_steps(backend.compile(grammar), backend.vocabulary)
        if slowest > mask_seconds:
            found = f"each token of the grammar takes {slowest:.2f} s of CPU time, and every request waits for it"
            error = (found, *SMALLER)
    except MemoryError:
        raise
    except GrammarError as refused:
        error = (refused.found, refused.wanted, refused.remedy)
    except BaseException as failed:
        found = f"{backend.name} failed on this {grammar.kind}: {type(failed).__name__}: {failed}"
        error = (found, "a grammar that it can read", "")
    return Verdict(0, error)


if __name__ == "__main__":
    leave(main())
