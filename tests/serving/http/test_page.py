"""The page at `/` in Chromium, against a scripted server: streams, the stop button, charts, errors,
and scripts that must not run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields

import pytest

from sglcore.serving.http.page.route import page as page_file
from sglcore.serving.http.page.route import policy
from tests.serving.page_server import Script, chat, ended, make_app, usage
from tests.serving.servers import Server
from tests.serving.threaded import in_thread

FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run"
HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=2</script> & <b>bold</b>"


def test_the_page_is_one_document_that_names_no_other_host() -> None:
    content = page_file()
    assert len(content) < 90_000 and b" src=" not in content and b"stylesheet" not in content
    links = re.findall(rb"(?:https?:)?//[a-z][^\s'\"<>)]*", re.sub(rb"http://www\.w3\.org/2000/svg", b"", content))
    assert links == []
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|<[a-z][^>]* style=", content)


def test_the_policy_allows_the_scripts_and_the_style_by_hash_and_changes_with_them() -> None:
    found = policy(page_file())
    assert found.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in found
    assert found.count("'sha256-") == page_file().count(b"<script>") + 1 > 2 and "connect-src 'self'" in found
    assert policy(page_file().replace(b'"use strict";', b'"use strict"; ')) != found


browser_tests = pytest.mark.needs("browser")


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def address(script: Script) -> Iterator[str]:
    with in_thread(make_app(script)) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser, address: str, script: Script):
    """A fresh, ready tab on the page, with a reset server. At the end, check that no script failed
    and that the page contacted only that server."""
    fresh = Script()
    for item in fields(Script):
        setattr(script, item.name, getattr(fresh, item.name))
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(10_000)
    page = context.new_page()
    faults, asked = [], []
    context.on("weberror", lambda error: faults.append(str(error.error)))
    context.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("#send:enabled")
    yield page
    context.close()
    assert faults == [] and [url for url in asked if not url.startswith((address, "data:"))] == []


def say(tab, text: str = "Hi") -> None:
    """Send a message and wait until its answer has ended."""
    tab.fill("#prompt", text)
    tab.press("#prompt", "Enter")
    tab.wait_for_selector("#send:visible")


def last(tab, part: str = ".body") -> str:
    return tab.locator(f".turn.assistant >> nth=-1 >> {part}").inner_text()


@browser_tests
def test_an_answer_that_arrives_byte_by_byte_is_whole(tab, script: Script) -> None:
    words = ["Grüße, ", "世界 ", "🦊🦊", "\n\nend"]
    script.chunks = [chat(role="assistant"), *map(chat, words), ended("stop", seed_used=2**63 - 25), usage(12, 4, 8)]
    script.is_bytewise = True
    say(tab)
    assert last(tab) == "".join(words)
    meta = last(tab, ".meta")
    for part in ("first token after", "tokens/s", "4 tokens", "prompt of 12, 8 from cache"):
        assert part in meta
    tab.click("text=Keep the seed")
    assert tab.input_value("#seed") == str(2**63 - 25) and str(2**63 - 25) in tab.inner_text("#notice")
    say(tab, "Again")
    assert f'"seed":{2**63 - 25},' in script.raw[-1]
    assert [message["role"] for message in script.received[-1]["messages"]] == ["user", "assistant", "user"]


@browser_tests
def test_events_are_read_the_same_wherever_the_text_is_split(tab) -> None:
    split_everywhere = """text => [...Array(text.length + 1).keys()].map(place => {
        const found = [], read = eventReader(data => found.push(data));
        read(text.slice(0, place));
        read(text.slice(place));
        return found;
    })"""
    text = 'data: {"a": 1}\r\n\r\n: a comment\n\ndata:one\r\ndata: two\r\n\r\nevent: x\rdata: three\r\rdata: [DONE]\n\n'
    found = tab.evaluate(split_everywhere, text)
    assert found == [['{"a": 1}', "one\ntwo", "three", "[DONE]"]] * (len(text) + 1)


@browser_tests
def test_what_the_model_writes_is_never_markup(tab, script: Script) -> None:
    calls = [{"index": 0, "id": "c", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}]
    script.chunks = [chat(reasoning_content=HOSTILE), chat(HOSTILE), chat(tool_calls=calls), ended("stop"), usage(1, 3)]
    script.warnings = HOSTILE
    say(tab, HOSTILE)
    assert last(tab) == HOSTILE and HOSTILE in last(tab, ".call") and last(tab, ".note") == HOSTILE
    assert tab.locator(".turn img, .turn script, .turn .body b").count() == 0
    assert tab.evaluate("window.hit") is None
    assert "<b>no</b> graphs here" in tab.locator("#rows").inner_text()


@browser_tests
def test_the_policy_stops_scripts_and_other_hosts(tab) -> None:
    violated = """act => new Promise(done => {
        document.addEventListener('securitypolicyviolation', event => done(event.violatedDirective), { once: true });
        if (act === 'fetch') fetch('http://127.0.0.2:9/').catch(() => 0);
        const script = document.createElement('script');
        script.textContent = 'window.hit = 1';
        if (act === 'script') document.body.append(script);
    })"""
    assert tab.evaluate(violated, "script") == "script-src-elem"
    assert tab.evaluate(violated, "fetch") == "connect-src"
    assert tab.evaluate("window.hit") is None


@browser_tests
@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_ends_the_stream_at_the_server_and_keeps_the_text(tab, script: Script, way: str) -> None:
    script.chunks, script.hold = [chat("Once upon")], True
    tab.fill("#prompt", "Tell")
    tab.press("#prompt", "Enter")
    tab.wait_for_selector("text=Once upon")
    if way == "button":
        tab.click("#stop")
    else:
        tab.keyboard.press("Escape")
    assert script.left.wait(10)
    tab.wait_for_selector("#send:visible")
    assert last(tab) == "Once upon" and "stopped" in last(tab, ".meta")
    script.chunks, script.hold = [chat("ok"), ended("stop"), usage(1, 1)], False
    say(tab, "Go on")
    assert script.received[-1]["messages"][1] == {"role": "assistant", "content": "Once upon"}


@browser_tests
def test_errors_are_shown_as_the_server_words_them(tab, script: Script) -> None:
    said = {
        "message": "found 9000 prompt tokens; wanted at most 1024",
        "type": "invalid_request_error",
        "param": "messages",
    }
    script.refusal = (400, {"error": said})
    say(tab)
    assert last(tab, ".note") == f"{said['message']} (invalid_request_error, in messages)"
    script.refusal = None
    script.chunks = [chat("half"), {"error": {"message": "the engine died", "type": "server_error"}}]
    say(tab)
    assert last(tab) == "half" and last(tab, ".note").startswith("the engine died")
    script.chunks, script.is_cut = [chat("half")], True
    say(tab)
    assert "ended before the answer did" in last(tab, ".note")
    tab.route("**/chat/completions", lambda route: route.abort())
    say(tab)
    assert "no connection to the server" in last(tab, ".note")


@browser_tests
def test_the_settings_travel_and_what_is_empty_does_not(tab, script: Script) -> None:
    script.chunks = [chat("{}"), ended("stop"), usage(1, 1)]
    say(tab, "first\nsecond")
    sent = script.received[-1]
    assert sent["messages"] == [{"role": "user", "content": "first\nsecond"}] and sent["model"] == "small"
    assert sent.keys() == {"path", "model", "stream", "stream_options", "messages"}
    values = {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_p": "0.9",
        "max_tokens": "7",
        "seed": "18446744073709551615",
    }
    for name, value in values.items():
        tab.fill(f"#{name}", value)
    tab.fill("#schema", '{"type": "object"}')
    say(tab)
    sent = script.received[-1]
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["seed"]) == (0.5, 0.9, 7, 2**64 - 1)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    tab.fill("#schema", '{"type": ')
    tab.fill("#prompt", "Not sent")
    tab.press("#prompt", "Enter")
    assert "not JSON" in tab.locator("#schema-wrong").inner_text()
    assert len(script.received) == 2 and tab.input_value("#prompt") == "Not sent"


@browser_tests
def test_shift_and_enter_make_a_new_line(tab, script: Script) -> None:
    script.chunks = [chat("ok"), ended("stop"), usage(1, 1)]
    tab.fill("#prompt", "one")
    tab.press("#prompt", "Shift+Enter")
    tab.keyboard.type("two")
    assert script.received == []
    tab.keyboard.press("Enter")
    tab.wait_for_selector("text=ok")
    assert script.received[0]["messages"][0]["content"] == "one\ntwo"


@browser_tests
def test_reasoning_is_folded_and_tool_calls_take_their_results(tab, script: Script) -> None:
    parts = [("get_weather", '{"city":'), ("", ' "Oslo"}')]
    calls = [
        {
            "index": 0,
            **({"id": "call_1"} if name else {}),
            "function": {**({"name": name} if name else {}), "arguments": text},
        }
        for name, text in parts
    ]
    thoughts = [chat(reasoning_content="I should "), chat(reasoning_content="look.")]
    script.chunks = [*thoughts, *(chat(tool_calls=[call]) for call in calls), ended("tool_calls"), usage(5, 9)]
    say(tab, "Weather?")
    assert not tab.locator(".thought p").is_visible()
    tab.click("text=Reasoning")
    assert tab.locator(".thought p").inner_text() == "I should look."
    assert last(tab, ".call b") == "get_weather" and last(tab, ".call pre") == '{\n  "city": "Oslo"\n}'
    tab.fill(".call textarea", "4 degrees")
    script.chunks = [chat("Cold."), ended("stop"), usage(5, 2)]
    tab.click("text=Send the results")
    tab.wait_for_selector("text=Cold.")
    assert script.received[-1]["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees"}


@browser_tests
def test_a_completion_goes_on_where_the_text_ends(tab, script: Script) -> None:
    script.chunks = [{"choices": [{"index": 0, "text": " upon a time", "finish_reason": "length"}]}, usage(1, 3)]
    tab.click("#show-complete")
    say(tab, "Once")
    assert last(tab) == "Once upon a time" and "token limit" in last(tab, ".meta")
    sent = script.received[-1]
    assert sent["path"] == "/v1/completions" and sent["prompt"] == "Once" and "messages" not in sent


MARKDOWN = """# Title

Some **bold**, *soft*, `code` and [a link](https://example.org/a_b_c), not [this](javascript:alert(1)) nor 2*3*4 or snake_case_name.
Second line.

1. one
   - inner
2. two

```py
x = "<b>"

**y**
```

| a | b |
|---|--:|
| 1 | `2` |

> quoted
"""


@browser_tests
@pytest.mark.parametrize("is_bytewise", [False, True])
def test_an_answer_is_shown_as_markdown_and_copied_as_it_was_written(tab, script: Script, is_bytewise: bool) -> None:
    script.chunks = [
        *(chat(MARKDOWN[place : place + 7]) for place in range(0, len(MARKDOWN), 7)),
        ended("stop"),
        usage(1, 9),
    ]
    script.is_bytewise = is_bytewise
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(tab, "**not mine**")
    body = tab.locator(".turn.assistant .body")
    shape = "node => [...node.querySelectorAll('*')].map(each => each.tagName.toLowerCase()).join(' ')"
    assert body.evaluate(shape) == (
        "h3 p strong em code a ol li ul li li div div span button pre code"
        " div table thead tr th th tbody tr td td code blockquote p"
    )
    assert body.locator("a").get_attribute("href") == "https://example.org/a_b_c"
    assert body.locator("p").first.inner_text() == (
        "Some bold, soft, code and a link, not [this](javascript:alert(1)) nor 2*3*4 or snake_case_name.\nSecond line."
    )
    assert body.locator("pre").inner_text() == 'x = "<b>"\n\n**y**'
    assert tab.locator(".turn.user .body").inner_text() == "**not mine**"
    tab.fill("#schema", "{}")
    script.chunks = [chat('{"a":\n  "*b*"}'), ended("stop"), usage(1, 9)]
    say(tab)
    assert last(tab) == '{"a":\n  "*b*"}'
    tab.locator(".turn.assistant .meta >> nth=0 >> text=Copy").click()
    tab.wait_for_selector("text=Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == MARKDOWN


@browser_tests
def test_markup_that_never_ends_is_text_and_is_read_in_time(tab) -> None:
    texts = [
        "`" * 9000,
        "**" * 4500,
        "> " * 4000,
        "- " * 4000,
        "[" * 9000,
        "*a " * 3000,
        "|" * 9000,
        "_" * 9000,
        "`a ``" * 2000,
    ]
    shown = """texts => texts.map(text => {
        const node = document.createElement('div'), begin = performance.now();
        filled(node, blocksOf(text));
        return [node.textContent.length > 0 || node.childElementCount > 0, performance.now() - begin];
    })"""
    assert all(is_shown and ms < 1000 for is_shown, ms in tab.evaluate(shown, texts))


@browser_tests
def test_a_message_that_is_refused_does_not_stay_in_the_conversation(tab, script: Script) -> None:
    script.refusal = (400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    say(tab, "a long one")
    assert "unanswered" in tab.get_attribute(".turn.user", "class")
    script.refusal, script.chunks = None, [chat("ok"), ended("stop"), usage(1, 1)]
    say(tab, "short")
    assert [message["content"] for message in script.received[-1]["messages"]] == ["short"]
    tab.click(".turn.user >> nth=0 >> text=Delete")
    assert tab.locator(".turn").count() == 2
    tab.click("text=Regenerate")
    tab.wait_for_selector("#send:visible")
    assert [message["content"] for message in script.received[-1]["messages"]] == ["short"]
    assert tab.locator(".turn").count() == 2 and len(script.received) == 3
    tab.click(".turn.user >> text=Edit")
    tab.fill(".turn.user textarea", "shorter")
    tab.click(".turn.user >> text=Send")
    tab.wait_for_selector(".turn.user .body >> text=shorter")
    tab.wait_for_selector("#send:visible")
    assert [message["content"] for message in script.received[-1]["messages"]] == ["shorter"]
    script.refusal = (503, {"error": {"message": "not now"}})
    say(tab, "again")
    script.refusal = None
    tab.click("text=Retry")
    tab.wait_for_selector(".turn:last-child >> text=ok")
    assert [message["content"] for message in script.received[-1]["messages"]] == ["shorter", "ok", "again"]
    assert tab.locator(".unanswered").count() == 0


@browser_tests
def test_a_reload_keeps_the_conversation(tab, script: Script) -> None:
    tab.fill("#system", "Be kind.")
    script.chunks = [chat(reasoning_content="Hm."), chat("**one**"), ended("stop", seed_used=2**63 - 25), usage(1, 1)]
    say(tab, "first")
    script.chunks, script.hold = [chat("half")], True
    tab.fill("#prompt", "second")
    tab.press("#prompt", "Enter")
    tab.wait_for_selector("text=half")
    before = tab.locator("#chat-turns .turn >> nth=1").inner_text()
    tab.reload()
    tab.wait_for_selector("#send:enabled")
    assert tab.locator("#chat-turns .turn >> nth=1").inner_text().replace("Regenerate", "") == before
    assert last(tab) == "half" and "stopped" in last(tab, ".meta")
    script.chunks, script.hold = [chat("ok"), ended("stop"), usage(1, 1)], False
    say(tab, "third")
    sent = [message["content"] for message in script.received[-1]["messages"]]
    assert sent == ["Be kind.", "first", "**one**", "second", "half", "third"]


def titles(tab) -> list[str]:
    return tab.locator("#chats .open").all_inner_texts()


@browser_tests
def test_conversations_are_listed_opened_deleted_and_brought_back(tab, script: Script) -> None:
    script.chunks = [chat("ok"), ended("stop"), usage(1, 1)]
    say(tab, 'a "first" <b>one</b>')
    tab.click("#clear")
    assert tab.locator(".turn").count() == 0 and tab.evaluate("document.activeElement.id") == "prompt"
    say(tab, "second")
    assert titles(tab) == ["second", 'a "first" <b>one</b>']
    tab.click("#chats .open >> nth=1")
    assert tab.locator(".turn.user .body").inner_text() == 'a "first" <b>one</b>'
    other = tab.context.new_page()
    other.goto(tab.url)
    other.wait_for_selector("#send:enabled")
    assert other.locator(".turn").count() == 0
    other.click("#chats .open >> nth=1")
    say(tab, "more")
    other.wait_for_selector(".turn.user .body >> text=more")
    assert other.locator(".turn").count() == 4
    other.close()
    tab.click("#chats .gone >> nth=0")
    assert titles(tab) == ["second"] and tab.locator(".turn").count() == 0
    tab.click("#notice >> text=Undo")
    assert len(titles(tab)) == 2 and tab.locator(".turn").count() == 4
    for _ in range(2):
        tab.click("#chats .gone >> nth=0")
    tab.reload()
    tab.wait_for_selector("#send:enabled")
    assert tab.locator(".turn").count() == 0 and tab.evaluate("localStorage.length") == 0


@browser_tests
def test_a_browser_without_room_and_one_with_rubbish_in_it_still_talk(tab, script: Script) -> None:
    script.chunks = [chat("ok"), ended("stop"), usage(1, 1)]
    tab.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 20))")
    say(tab, "no room")
    assert last(tab) == "ok" and "no room left" in tab.inner_text("#notice")
    tab.evaluate("localStorage.clear()")
    say(tab, "room")
    assert titles(tab) == ["no room"]
    name = tab.evaluate("view.chat")
    for text in ("{", '{"turns": [{"role": "assistant", "content": 3}]}', '{"turns": {}}', "7", "[]"):
        rubbish = {f"sglcore-chat-{name}": text, "sglcore-settings": text, "sglcore-completions": text}
        tab.evaluate("all => Object.entries(all).forEach(item => localStorage.setItem(...item))", rubbish)
        tab.evaluate("name => sessionStorage.setItem('sglcore-current', name)", name)
        tab.reload()
        tab.wait_for_selector("#send:enabled")
        assert tab.locator(".turn").count() == 0
    say(tab, "well again")
    assert last(tab) == "ok"


@browser_tests
def test_settings_outlive_the_page_until_they_are_reset(tab, script: Script) -> None:
    tab.fill("#temperature", "0.5")
    tab.fill("#tools", "[]")
    tab.fill("#prompt", "a draft")
    tab.reload()
    tab.wait_for_selector("#send:enabled")
    assert (tab.input_value("#temperature"), tab.input_value("#prompt")) == ("0.5", "a draft")
    tab.focus("#temperature")
    tab.keyboard.type("e")
    tab.press("#prompt", "Enter")
    assert "Temperature is not a number" in tab.inner_text("#notice") and script.received == []
    tab.click("#reset")
    assert tab.input_value("#temperature") == tab.input_value("#tools") == ""
    assert tab.evaluate("localStorage.length") == 0 and not tab.is_visible("#reset")


@browser_tests
def test_the_keyboard_alone_edits_cancels_and_undoes_and_no_focus_is_taken(tab, script: Script) -> None:
    script.chunks = [chat("one"), ended("stop"), usage(1, 1)]
    say(tab, "first")
    tab.press("#prompt", "ArrowUp")
    tab.keyboard.type(" and more")
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.textContent") == "Edit"
    tab.keyboard.press("Enter")
    script.chunks = [chat("two"), ended("stop"), usage(1, 1)]
    tab.keyboard.type("!")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".turn.assistant .body >> text=two")
    assert script.received[-1]["messages"] == [{"role": "user", "content": "first!"}]
    tab.click("#notice >> text=Undo")
    assert tab.locator(".turn .body").all_inner_texts() == ["first", "one"]
    script.hold = True
    script.chunks = [chat("three")]
    tab.fill("#prompt", "next")
    tab.press("#prompt", "Enter")
    tab.wait_for_selector("text=three")
    tab.focus("#system")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#send:visible")
    assert tab.evaluate("document.activeElement.id") == "system"


@browser_tests
def test_a_reader_who_scrolls_back_is_left_there_and_can_return(tab, script: Script) -> None:
    script.chunks = [chat("line\n\n" * 200), ended("stop"), usage(1, 1)]
    say(tab)
    tab.evaluate("document.querySelector('#scroll').scrollTop = 0")
    tab.wait_for_selector("#latest:visible")
    tab.click("#latest")
    tab.wait_for_selector("#latest", state="hidden")
    assert (
        tab.evaluate("(box => box.scrollHeight - box.scrollTop - box.clientHeight)(document.querySelector('#scroll'))")
        < 2
    )


CONTRASTS = """() => {
    const parts = color => (color.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, place) => sum + c * [.2126, .7152, .0722][place], 0);
    const under = node => { for (let at = node; at; at = at.parentElement) {
        const color = parts(getComputedStyle(at).backgroundColor);
        if (color.length === 3 || color[3] === 1) return color;
    } return [255, 255, 255]; };
    const shown = [...document.querySelectorAll('body *')].filter(node => node.checkVisibility() && !node.disabled
        && (node.placeholder || [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())));
    return shown.map(node => {
        const pair = [light(parts(getComputedStyle(node, node.placeholder && '::placeholder').color)), light(under(node))].sort((a, b) => b - a);
        return [(pair[0] + .05) / (pair[1] + .05), node.outerHTML.slice(0, 80)];
    }).filter(([ratio]) => ratio < 4.5);
}"""


@browser_tests
def test_every_text_has_contrast_nothing_moves_where_that_is_not_wanted_and_scripts_run_their_way(
    tab, script: Script
) -> None:
    tab.emulate_media(reduced_motion="reduce")
    script.warnings = "unknown: x"
    script.chunks = [
        chat(reasoning_content="hm"),
        chat(MARKDOWN + "\n\nשלום, world"),
        ended("stop", seed_used=7),
        usage(1, 1),
    ]
    say(tab)
    script.refusal = (503, {"error": {"message": "not now", "type": "server_error"}})
    say(tab)
    assert tab.locator(".body p >> nth=-1").evaluate("node => getComputedStyle(node).direction") == "rtl"
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        assert tab.evaluate(CONTRASTS) == []
    script.refusal, script.hold, script.chunks = None, True, [chat("still")]
    tab.fill("#prompt", "more")
    tab.press("#prompt", "Enter")
    tab.wait_for_selector("text=still")
    assert tab.evaluate("document.getAnimations().length") == 0


@browser_tests
def test_a_model_that_generates_no_text_is_ready_and_says_so(tab, address: str, script: Script) -> None:
    script.generates = False
    tab.goto(address)
    tab.wait_for_selector("#state >> text=ready")
    tab.wait_for_selector("text=This model generates no text")
    assert not tab.is_visible("#prompt") and not tab.is_visible("#loading") and not tab.is_visible("#temperature")
    tab.wait_for_selector("#chart-load[aria-label^='Requests: 3 running']")
    assert '{"model":"small","input":' in tab.inner_text("#empty pre") and not tab.is_visible("nav")


@browser_tests
def test_what_is_said_in_another_tab_is_in_the_list_of_this_one(tab, address: str, script: Script) -> None:
    script.chunks = [chat("Fine."), ended("stop"), usage(1, 1)]
    other = tab.context.new_page()
    other.goto(address)
    other.wait_for_selector("#send:enabled")
    say(other, "From the other tab")
    tab.click("#chats >> text=From the other tab")
    assert last(tab) == "Fine."


@browser_tests
def test_the_charts_move_and_the_ledger_is_a_table(tab) -> None:
    def ink() -> int:
        return tab.evaluate("""(() => {
            const canvas = document.querySelector('#chart-load'), brush = canvas.getContext('2d');
            return brush.getImageData(0, 0, canvas.width, canvas.height).data.filter(value => value).length;
        })()""")

    tab.wait_for_selector("#chart-speed[aria-label^='Tokens/s: 250;']")
    labels = {name: tab.get_attribute(f"#chart-{name}", "aria-label") for name in ("load", "kv", "hits")}
    assert labels["load"] == "Requests: 3 running; 2 waiting"
    assert labels["kv"] == "KV cache: 25.0 %; of pages in use; 96 % of rows read were on the device"
    assert labels["hits"] == "Prefix hits: 80 %; 80 % since the start"
    cut = "[...document.querySelectorAll('.foot')].filter(each => each.scrollWidth > each.clientWidth).length"
    assert tab.locator(".foot").count() == 4 and tab.evaluate(cut) == 0
    before, now = ink(), tab.get_attribute("#chart-speed", "aria-label")
    tab.wait_for_selector(f"#chart-speed:not([aria-label='{now}'])")
    assert ink() > before > 0
    assert "less than asked: full" in tab.locator("#rows tr >> nth=1").inner_text()


@browser_tests
def test_while_the_model_loads_its_phase_is_shown_and_then_the_page_is_usable(
    tab, address: str, script: Script
) -> None:
    script.startup = {"phase": "loading weights", "done": 3, "total": 12, "elapsed_s": 4.5}
    tab.goto(address)
    tab.wait_for_selector("text=loading weights, 3 of 12, 4.5 s")
    assert tab.evaluate("document.querySelector('#bar').value") == 3
    tab.fill("#prompt", "early")
    tab.press("#prompt", "Enter")
    assert "not ready" in tab.inner_text("#notice") and tab.input_value("#prompt") == "early"
    script.startup = None
    tab.wait_for_selector("#send:enabled")
    assert not tab.is_visible("#loading")


@browser_tests
def test_an_engine_that_goes_and_comes_back_is_seen(tab, script: Script) -> None:
    script.chunks = [chat("ok"), ended("stop"), usage(1, 1)]
    say(tab)
    script.startup = {"phase": "draining", "done": 0, "total": 0, "elapsed_s": 1.0}
    tab.wait_for_selector("#send:disabled")
    tab.wait_for_selector("#state >> text=draining")
    assert last(tab) == "ok"
    script.startup = {"phase": "dead", "done": 0, "total": 0, "elapsed_s": 1.0, "reason": "out of memory"}
    tab.wait_for_selector("#loading >> text=out of memory")
    assert not tab.is_visible("#bar")
    script.startup = None
    tab.wait_for_selector("#send:enabled")
    tab.wait_for_selector("#state >> text=ready")


@browser_tests
def test_an_api_key_is_asked_for_and_stays_in_the_tab(tab, address: str, script: Script) -> None:
    script.key = "s3cret"
    script.chunks = [chat("ok"), ended("stop"), usage(1, 1)]
    tab.goto(address)
    tab.wait_for_selector("text=found no API key that is known")
    tab.fill("#key-asked", "wrong")
    tab.press("#key-asked", "Enter")
    tab.wait_for_selector("text=This API key is not known here")
    tab.fill("#key-asked", "s3cret")
    tab.click("text=Use it")
    tab.wait_for_selector("#send:enabled")
    say(tab)
    assert script.keys == ["Bearer s3cret"]
    assert tab.evaluate("sessionStorage.getItem('sglcore-key')") == "s3cret"
    assert "s3cret" not in tab.evaluate("JSON.stringify(localStorage)") and tab.evaluate("document.cookie") == ""


@browser_tests
def test_a_phone_shows_one_view_at_a_time_and_nothing_overflows(tab, script: Script) -> None:
    script.chunks = [chat("x" * 400), ended("stop"), usage(1, 1)]
    tab.set_viewport_size({"width": 400, "height": 800})
    say(tab)
    for name, part in (("settings", "#schema"), ("server", "#chart-kv"), ("chat", "#prompt")):
        tab.click(f"#show-{name}")
        assert tab.is_visible(part)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400
        assert tab.is_visible("#prompt") == (name == "chat")


@browser_tests
def test_every_field_and_button_has_a_name(tab) -> None:
    unnamed = """[...document.querySelectorAll('input, textarea, button, progress')].filter(node =>
        !node.labels?.length && !node.getAttribute('aria-label') && !node.textContent.trim()).map(node => node.id)"""
    assert tab.evaluate(unnamed) == []


@browser_tests
def test_with_the_real_server_answers_stream_a_schema_holds_and_stopping_frees_the_slot(
    browser, server: Server
) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    tab.goto(server.url)
    tab.wait_for_selector("#send:enabled")
    tab.fill("#temperature", "0")
    say(tab, "Hello")
    assert last(tab).startswith("Hello!") and "tokens/s" in last(tab, ".meta")
    assert "attention" in tab.locator("#rows").inner_text()
    generated = server.get("/server_info/stats")["generation_tokens"]
    tab.fill("#schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 600}))
    tab.fill("#prompt", "Numbers")
    tab.press("#prompt", "Enter")
    tab.locator(".turn.assistant >> nth=-1 >> text=/\\[\\s*-?\\d/").wait_for()
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#send:visible")
    assert "stopped" in last(tab, ".meta")
    tab.wait_for_selector("#chart-load[aria-label^='Requests: 0 running']")
    assert server.get("/server_info/stats")["generation_tokens"] - generated < 600
    context.close()
