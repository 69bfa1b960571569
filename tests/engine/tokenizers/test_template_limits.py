"""What a chat template may ask for in size, and what becomes of its errors and of two renderings at
once."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sglcore.engine.tokenizers.chat_template import ChatTemplate, TextError
from sglcore.engine.tokenizers.template_bounds import Bounds
from sglcore.engine.tokenizers.template_sandbox import MAX_BITS, MAX_WIDTH

BOUNDS = Bounds(steps=20_000, made=1_000_000, output=500_000)


def render(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}, BOUNDS).render([], variables=variables)


@pytest.mark.parametrize(
    "source",
    [
        *("{{ 'x'.ljust(N) }}", "{{ 'x'.rjust(N) }}", "{{ 'x'.center(N) }}", "{{ '7'.zfill(N) }}"),
        *("{{ '\\t'.expandtabs(N) }}", "{{ 'x' | center(N) }}", "{{ 'x\\ny' | indent(N) }}", "{{ 1.5 | round(N) }}"),
        *("{{ [1] | batch(N, 'x') | list | length }}", "{{ [1] | batch(linecount=N, fill_with=1) | list | length }}"),
        *("{{ [1] | slice(N) | list | length }}", "{{ [1] | slice(slices=N) | list | length }}"),
        *("{{ 1.5 | round(N, 'floor') }}", "{{ ['x'] | map('center', N) | first }}"),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_work_grows_with_has_the_same_limit_on_both_sides_of_zero(source: str, sign: int) -> None:
    with pytest.raises(TextError, match=f"{sign * (MAX_WIDTH + 1)} characters, more than {MAX_WIDTH}"):
        render(source.replace("N", str(sign * (MAX_WIDTH + 1))))
    try:
        render(source.replace("N", str(sign * MAX_WIDTH)))
    except TextError as error:
        assert "more than" not in str(error)


@pytest.mark.parametrize("value", [MAX_WIDTH + 1, -MAX_WIDTH - 1])
def test_a_number_that_is_filtered_is_no_width(value: int) -> None:
    for source in ("{{ given | round }}", "{{ given | round(2) }}", "{{ given | center(3) }}"):
        assert float(render(source, given=value)) == value


@pytest.mark.parametrize(
    "form",
    [
        *(
            "'{:N}'.format(1)",
            "'{:>N}'.format('x')",
            "'{:0N}'.format(1)",
            "'{a:N}'.format(a=1)",
            "'{a:N}'.format_map(d)",
        ),
        *(
            "'%Nd'.encode() % 1",
            "'%Nd' % 1",
            "'%-Nd' % 1",
            "'% Nd' % 1",
            "'%+Nd' % 1",
            "'%#Nx' % 1",
            "'%-+ #Ns' % 'x'",
            "'%0Nd' % (1,)",
            "'%(a)Nd' % d",
            "'%Ns' | format('x')",
            "'%(a)Ns' | format(a=1)",
        ),
    ],
)
def test_a_format_may_have_a_width_of_five_digits_and_no_more(form: str) -> None:
    source = "{% set d = {'a': 1} %}{{ FORM | length }}".replace("FORM", f"({form})")
    assert render(source.replace("N", "99999")) == "99999"
    with pytest.raises(TextError, match=f"may be wider than {MAX_WIDTH} characters"):
        render(source.replace("N", "100000"))


@pytest.mark.parametrize(
    "form",
    [
        *("'{:{}}'.format(1, 2)", "'{:>{}}'.format(1, 2)", "'{:.{}}'.format(1.5, 2)", "'{0!r:{1}}'.format(1, 2)"),
        *("'{} {:<{}}'.format(1, 2, 3)", "'{a:{b}}'.format(a=1, b=2)", "'{a:{b}}'.format_map({'a': 1, 'b': 2})"),
        *("'%*d' % (2, 1)", "'%-*d' % (2, 1)", "'%.*f' % (2, 1.5)", "'%5.*f' % (2, 1.5)", "'%s %*d' % (1, 2, 3)"),
        *("'%*d' | format(2, 1)", "'%d %0*d' | format(1, 2, 3)", "'%*d'.encode() % (2, 1)"),
        *("'%(a(b))9999999d' % {'a(b)': 1}", "'%(a(b))2d' % {'a(b)': 1}", "'%%%*d' % (2, 1)"),
    ],
)
def test_a_width_that_a_value_gives_is_refused_however_small(form: str) -> None:
    with pytest.raises(TextError, match=f"may be wider than {MAX_WIDTH} characters"):
        render("{{ FORM }}".replace("FORM", form))


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("'{}: {}'.format(1, 2)", "1: 2"),
        ("'{a!r}: {b:>2}'.format(a='x', b=2)", "'x':  2"),
        ("'20240101: {}'.format(1)", "20240101: 1"),
        ("'20240101: %d' % 1", "20240101: 1"),
        ("'{} {:>3} {{x}}'.format(1, 2)", "1   2 {x}"),
        ("'{0[a]}: {1}'.format({'a': 1}, 2)", "1: 2"),
        ("'%d * %d' % (2, 3)", "2 * 3"),
        ("'%s*' % 2", "2*"),
        ("'%s%% *' % 2", "2% *"),
        ("'%d *' | format(2)", "2 *"),
        ("'%*d' + '{:{}}'", "%*d{:{}}"),
        ("'123456 {:{}}' * 2", "123456 {:{}}" * 2),
    ],
)
def test_text_that_only_looks_like_a_wide_format_is_written(form: str, wanted: str) -> None:
    assert render("{{ FORM }}".replace("FORM", form)) == wanted


@pytest.mark.parametrize(
    "source",
    [
        *("{{ 'x' * -N }}", "{{ -N * 'x' }}", "{{ [1] * -N }}", "{{ (1, 2) * -N }}", "{{ 7 ** -N }}", "{{ 'x' * 0 }}"),
        "{{ '' * N }}",
    ],
)
def test_what_becomes_no_larger_has_no_limit(source: str) -> None:
    assert render(source.replace("N", str(MAX_WIDTH * 10))) in ("", "[]", "()", "0.0")


@pytest.mark.parametrize("digit", ["\u0669", "\uff19"])
def test_a_width_in_other_digits_is_as_wide(digit: str) -> None:
    assert render(f"{{{{ '{{:{digit}}}'.format(1) }}}}") == "        1"
    with pytest.raises(TextError, match="may be wider"):
        render(f"{{{{ '{{:{digit * 6}}}'.format(1) }}}}")


@pytest.mark.parametrize(
    "source",
    ["{{ ((1, 2) * N) | length }}", "{{ (N * (1, 2)) | length }}", "{{ ('xy'.encode() * N) | length }}"],
)
def test_tuples_and_bytes_are_repeated_up_to_the_limit_of_their_items(source: str) -> None:
    assert render(source.replace("N", str(MAX_WIDTH // 2))) == str(MAX_WIDTH)
    with pytest.raises(TextError, match=f"repeats to more than {MAX_WIDTH}"):
        render(source.replace("N", str(MAX_WIDTH // 2 + 1)))


def test_a_whole_number_is_multiplied_up_to_the_limit_of_its_bits() -> None:
    source = "{{ (given * other) % 7 }}"
    assert render(source, given=1 << (MAX_BITS - 3), other=3) == str((3 << (MAX_BITS - 3)) % 7)
    with pytest.raises(TextError, match=f"more than {MAX_BITS} bits"):
        render(source, given=1 << (MAX_BITS - 2), other=3)


@pytest.mark.parametrize("call", ["loop(range(30000))", "loop(iterable=range(30000))"])
def test_a_loop_that_calls_itself_counts_the_items_however_they_are_given(call: str) -> None:
    source = "{% for a in [9] recursive %}{{ CALL if loop.depth0 == 0 }}{% endfor %}".replace("CALL", call)
    with pytest.raises(TextError, match=f"takes more than {BOUNDS.steps} steps"):
        render(source)
    few = source.replace("30000", "3").replace("endfor", "else %}none{% endfor")
    assert render(few.replace("{{", "{{ a }}{{")) == "9012"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("loop([1], 2)", "takes 2 positional arguments but 3 were given"),
        ("loop([1], depth=0)", "unexpected keyword argument 'depth'"),
        ("loop()", "missing 1 required positional argument"),
        ("loop(3)", "'int' object is not iterable"),
    ],
)
def test_a_loop_that_calls_itself_takes_the_items_alone(call: str, said: str) -> None:
    source = "{% for a in [9] recursive %}{{ CALL if loop.depth0 == 0 }}{% endfor %}".replace("CALL", call)
    with pytest.raises(TextError, match=f"TypeError: .*{said}"):
        render(source)
    with pytest.raises(TextError, match="The loop must have the 'recursive' marker"):
        render("{% for a in [9] %}{{ loop([1]) }}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 2.0 ** 9999 }}", "OverflowError"),
        ("{{ '%(a)s' % {} }}", "KeyError"),
        ("{{ '{1}'.format(0) }}", "IndexError"),
        ("{{ 'x'.encode('nothing') }}", "LookupError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 'a'.index('b') }}", "ValueError"),
        ("{{ 5 | wordwrap(3) }}", "AttributeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_an_error_in_an_expression_is_the_templates_refusal_by_its_kind(source: str, kind: str) -> None:
    with pytest.raises(TextError, match=f"the chat template refuses these messages: {kind}: ") as refused:
        render(source)
    assert refused.value.field is None


COUNTED = {
    "a call of a method": ("{% set x = 'a'.upper() %}", 1),
    "a call of a function": ("{% set x = namespace() %}", 1),
    "a filter": ("{% set x = 'a' | upper %}", 1),
    "a sum": ("{% set x = 1 + 1 %}", 1),
    "a remainder": ("{% set x = 3 % 2 %}", 1),
    "texts that are joined": ("{% set x = 'a' ~ 1 %}", 1),
    "a loop": ("{% for x in [] %}{% endfor %}", 1),
    "a loop and its items": ("{% for x in [1, 2, 3] %}{% endfor %}", 4),
    "a loop in a loop": ("{% for x in [1] %}{% for y in [1] %}{% endfor %}{% endfor %}", 4),
    "a filter on each item": ("{% set x = [1, 2] | map('string') | list %}", 4),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_each_call_filter_and_item_is_a_step(kind: str) -> None:
    source, steps = COUNTED[kind]
    assert ChatTemplate({"default": source * 20}, {}, Bounds(steps=20 * steps)).render([]) == ""
    with pytest.raises(TextError, match=f"takes more than {20 * steps - 1} steps"):
        ChatTemplate({"default": source * 20}, {}, Bounds(steps=20 * steps - 1)).render([])


MADE = {
    "text that is written": "{{ given }}",
    "a list that is written": "{{ items }}",
    "a tuple that is written": "{{ pairs }}",
    "text of a method": "{% set x = given.upper() %}",
    "a list of a method": "{% set x = given.split(' ') %}",
    "text of a filter": "{% set x = given | upper %}",
    "a list of a filter": "{% set x = given | list %}",
    "a sum of texts": "{% set x = given + '' %}",
    "a sum of lists": "{% set x = items + [] %}",
    "texts that are joined": "{% set x = given ~ '' %}",
    "texts that are joined within others": "{% set x = [given ~ ''] %}",
    "a format": "{% set x = '%s' % given %}",
    "bytes": "{% set x = given.encode() %}",
}


@pytest.mark.parametrize("kind", MADE)
def test_what_every_expression_makes_counts(kind: str) -> None:
    given = {"given": "a" * 7 + " " * 33, "items": [1] * 40, "pairs": (1,) * 40}

    def done(most: int) -> str:
        return ChatTemplate({"default": MADE[kind]}, {}, Bounds(made=most)).render([], variables=given)

    most = 34 if kind == "a list of a method" else 40
    assert done(2 * most) is not None
    with pytest.raises(TextError, match=f"makes more than {most - 1} characters"):
        done(most - 1)


@pytest.mark.parametrize(("before", "within", "after"), [(15_000, 15_000, 2_000), (2_000, 2_000, 17_000)])
def test_two_renderings_at_once_count_apart(before: int, within: int, after: int) -> None:
    template = ChatTemplate({"default": "{% for x in given %}{% endfor %}."}, {}, BOUNDS)
    found: list[str] = []

    def other() -> None:
        found.append(template.render([], variables={"given": range(within)}))

    def items() -> Iterator[int]:
        yield from range(before)
        inner = Thread(target=other)
        inner.start()
        inner.join()
        yield from range(after)

    found.append(template.render([], variables={"given": items()}))
    assert found == [".", "."]


def test_a_rendering_is_limited_however_many_run_while_it_does() -> None:
    template = ChatTemplate({"default": "{% for x in given %}{% endfor %}."}, {}, BOUNDS)

    def items() -> Iterator[int]:
        yield from range(15_000)
        inner = Thread(target=template.render, args=([],), kwargs={"variables": {"given": [1]}})
        inner.start()
        inner.join()
        yield from range(15_000)

    with pytest.raises(TextError, match=f"takes more than {BOUNDS.steps} steps"):
        template.render([], variables={"given": items()})


def test_after_a_rendering_that_was_stopped_the_next_one_has_all_its_steps() -> None:
    template = ChatTemplate({"default": "{% for x in given %}{{ x }}{% endfor %}"}, {}, BOUNDS)
    for _ in range(2):
        with pytest.raises(TextError, match="steps"):
            template.render([], variables={"given": range(30_000)})
        assert template.render([], variables={"given": range(3)}) == "012"


@pytest.mark.parametrize(
    "source",
    [
        "a\n  {% if true %}\n  b\n  {%- endif %}\n\tc\n",
        "{% for x in [1, 2] %}\n  {{ x }}\n{% endfor %}\n\n",
        "  {# a note #}\nd{{- '\\n' -}}\n  e",
        "{% generation %}\n  f\n  {% endgeneration %}\n g",
        "{% set x %}\n {{ 1 }}\n{% endset %}[{{ x }}]",
    ],
)
def test_lines_are_cut_around_a_templates_tags_as_by_transformers(source: str) -> None:
    expected, _ = render_jinja_template([[]], chat_template=source)
    assert render(source) == expected[0]
