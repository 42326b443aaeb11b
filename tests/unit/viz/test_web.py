"""The page in Chromium: what it shows is read back from the pixels of its images."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ostinato.viz import TrajectoryFolder
from tests.unit.viz.rollouts import store
from tests.unit.viz.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("starlette", reason="the extra web is not installed")
pytest.importorskip("uvicorn", reason="the extra web is not installed")

pytestmark = pytest.mark.xdist_group("browser")

READ_PIXEL = """image => {
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight), pen = canvas.getContext('2d');
  pen.drawImage(image, 0, 0);
  return [image.naturalWidth, image.naturalHeight, ...pen.getImageData(2, 2, 1, 1).data.slice(0, 3)];
}"""


@contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(url)
    try:
        yield page
        assert problems == []
    finally:
        page.close()


def at(page: Any, trajectory: int, step: int, env: int = 0) -> list[tuple[int, ...]]:
    """Wait until a step is shown, and return the colours of its pictures."""
    page.locator(f"body[data-shown='{trajectory}/{step}/{env}']").wait_for(state="attached", timeout=20_000)
    images = page.locator(".views img").element_handles()
    found = [tuple(image.evaluate(READ_PIXEL)) for image in images]
    assert {size[:2] for size in found} <= {(8, 8)}
    return [colour[2:] for colour in found]


def colours(trajectory: int, step: int, env: int = 0) -> list[tuple[int, int, int]]:
    blues = [env * 50 + 5 * following + extra for following in (0, 1) for extra in (0, 10, 20, 21)]
    return [(trajectory, step, blue) for blue in blues]


def test_all_cameras_of_the_right_step(browser, tmp_path):
    with served(TrajectoryFolder(store(tmp_path / "a"))) as url, opened(browser, url) as page:
        assert at(page, 0, 0) == colours(0, 0)
        for key, *place in (
            ("ArrowRight", 0, 1, 0),
            ("n", 0, 2, 0),
            ("n", 1, 0, 0),  # over the end
            ("p", 0, 2, 0),  # and back
            ("ArrowUp", 1, 0, 0),
            ("ArrowUp", 2, 0, 0),
            ("End", 2, 3, 0),
            ("b", 2, 3, 1),
        ):
            page.keyboard.press(key)
            assert at(page, *place) == colours(*place)
        facts = page.locator("#facts").inner_text().replace("\n", " ")
        for words in ("step 3 of 4", "batch 1 of 2", "reward 2.03", "done yes (terminated)", "task task of 1"):
            assert words in facts
        page.keyboard.press("Home")
        at(page, 2, 0, 1)
        page.locator("#scrub").fill("2")
        assert at(page, 2, 2, 1) == colours(2, 2, 1)
        page.locator("#reward").click(position={"x": 60, "y": 20})
        at(page, 2, 0, 1)
        page.set_viewport_size({"width": 375, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == 375, "a phone scrolls one way"
        words = page.evaluate("values => values.map(brief)", [-0.0846, -32_412_345.0, 1.234e-7, 0, -1.5e20])
        assert words == ["-0.0846", "-32.4M", "1.2e-7", "0", "-1.5e20"]


def test_the_list_filters_jumps_and_is_walked(browser, tmp_path):
    source = TrajectoryFolder(store(tmp_path / "a", [(3, 2), (2, 2), (4, 2), (9, 2)]))
    with served(source) as url, opened(browser, url) as page:
        page.locator("#count", has_text=re.compile("^4 of 4$")).wait_for()
        found = [row.inner_text().split() for row in page.locator("#rows .row").all()]
        assert [" ".join(row) for row in found] == ["0 3 2 0.03", "1 2 2 2.01", "2 4 2 8.06", "3 9 2 27.36"]
        page.locator("#return-low").fill("2")
        page.locator("#length-high").fill("4")
        assert page.locator("#count").inner_text() == "2 of 4"
        assert [row.inner_text().split()[0] for row in page.locator("#rows .row").all()] == ["1", "2"]
        page.locator("#rows .row").nth(1).click()
        assert at(page, 2, 0) == colours(2, 0)
        page.locator("#return-low").fill("")
        page.locator("#length-high").fill("")
        page.locator("#length-low").fill("3")
        page.keyboard.press("ArrowRight")  # of the field, not of the page
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowLeft")
        at(page, 0, 2)
        page.locator("#env").select_option("1")
        at(page, 0, 2, 1)
        page.keyboard.press("ArrowRight")  # the choice gives the keys back
        at(page, 2, 0, 1)
        page.locator("#back").click()
        at(page, 0, 2, 1)
        for text in ("3", "77"):
            page.locator("#jump").fill(text)
            page.locator("#jump").press("Enter")
        at(page, 3, 0, 1)
        page.locator("#message", has_text="there is no trajectory 77").wait_for()


def test_answers_are_for_this_machine_alone(tmp_path):
    import http.client

    with served(TrajectoryFolder(store(tmp_path / "a"))) as url:
        host = url.removeprefix("http://")

        def ask(path: str, **headers: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(host, timeout=20)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            assert answer.status != 200 or "default-src 'none'" in (answer.getheader("Content-Security-Policy") or "")
            return answer.status, answer.read()

        assert ask("/")[0] == 200
        assert ask("/", Host="evil.example")[0] == 400
        assert ask("/api/frame?trajectory=-1")[0] == 400
        assert ask("/api/frame?trajectory=x")[0] == 400
        assert ask("/api/frame?trajectory=99&step=99&env=99")[0] == 200
        assert ask("/api/frame?real=1")[0] == 400
        assert ask("/api/frame?trajectory=99999999999999999999")[0] == 400
        for path in ("/../server.py", "/..%2fserver.py", "/%2e%2e/server.py", "//etc/passwd", "/page.js/../server.py"):
            assert ask(path)[0] == 404
        for name in ("127.0.0.1.evil.example", "0.0.0.0", "[::1]", "www.127.0.0.1", ""):
            assert ask("/api/source", Host=name)[0] == 400


def test_the_command_serves_and_ends(tmp_path):
    import signal
    import urllib.request

    path = store(tmp_path / "a")
    main = "from ostinato.cli.main import main; main()"
    command = [sys.executable, "-c", main, "view", str(path), "--web", "--episode", "2", "--step", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}api/source", timeout=30) as answer:
            assert b'"start":[2,1,0]' in answer.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert err == ""
