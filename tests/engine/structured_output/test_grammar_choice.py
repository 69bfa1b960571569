"""Which library compiles grammars, what the ledger says of it, and what it is told of the
vocabulary."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from sglcore.core.errors import ConfigError
from sglcore.engine.structured_output.grammar_cache import BACKENDS, open_grammars
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary

REMEDY = "SGLCORE_GRAMMAR_BACKEND=llguidance, xgrammar or off"
SMALL = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_the_ledger_names_the_library_that_is_asked_for_and_how_to_choose(name: str) -> None:
    wanted = "llguidance" if name == "auto" else name
    pytest.importorskip(wanted, reason=f"{wanted} is not installed")
    grammars, row = open_grammars(name, Vocabulary(SMALL, 2, (0,)))
    assert grammars is not None and grammars.backend.name == wanted
    checks: Any = grammars._checks
    assert checks._spec().backend == wanted and checks._spec().eos_ids == (0,)
    assert (row.requested, row.effective, row.remedy) == (name, wanted, REMEDY)
    assert (row.reason == "requested") is (name != "auto")
    grammars.close()


def test_grammars_that_are_turned_off_say_how_to_turn_them_on() -> None:
    grammars, row = open_grammars("off", Vocabulary(SMALL, 2, ()))
    assert grammars is None
    assert (row.requested, row.effective, row.reason, row.remedy) == ("off", "off", "requested", REMEDY)


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_what_grammars_lack_is_an_error_where_they_are_asked_for_by_name_and_a_row_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = "llguidance" if name == "auto" else name
    vocabularies = {
        "its generation_config.json": Vocabulary(SMALL, 2, ()),
        f"pip install {backend}": Vocabulary(SMALL, 2, (0,)),
    }
    monkeypatch.delitem(sys.modules, f"sglcore.engine.structured_output.grammar_{backend}", raising=False)
    monkeypatch.setitem(sys.modules, backend, None)
    for remedy, vocabulary in vocabularies.items():
        if name != "auto":
            with pytest.raises(ConfigError, match=f"; .*{remedy}"):
                open_grammars(name, vocabulary)
            continue
        grammars, row = open_grammars(name, vocabulary)
        assert grammars is None and row.effective == "off" and row.remedy.endswith(remedy)
        assert ("end-of-sequence" in row.reason) is (not vocabulary.eos_ids)
