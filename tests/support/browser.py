"""A headless Chromium without a network, driven through its debugging pipe; what it logs and asks for is kept."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--lang=en", "--hide-scrollbars",
)  # fmt: skip


class Page:
    """One tab. `problems` are its errors, warnings and exceptions, `requests` the addresses that it asked for."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._buffer, self._last = to, back, b"", 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        nothing = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.send("Network.emulateNetworkConditions", offline=True, **nothing)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            read = os.read(self._back, 1 << 20)
            assert read, "Chromium ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(params["args"]))

    def show(self, width: int, scheme: str = "light", height: int = 900) -> None:
        """Set the window's width in CSS pixels, and the colour scheme that the system prefers."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path) -> None:
        """Load a file and wait until it and its plots are drawn."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(
            "document.readyState === 'complete' && "
            "(document.documentElement.dataset.ready || !document.scripts.length) && "
            "[...document.querySelectorAll('.plot')].every((box) => box.querySelector('svg'))"
        )

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + TIMEOUT_S
        while not self.ask(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)


@contextmanager
def opened(profile: Path) -> Iterator[Page]:
    """A tab of a new browser, which keeps its files in a folder of its own and is ended in the end."""
    assert PROGRAM is not None
    there, to = os.pipe()
    back, here = os.pipe()

    def as_3_and_4() -> None:
        os.dup2(there, 253)
        os.dup2(here, 254)
        os.dup2(253, 3)
        os.dup2(254, 4)

    command = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with open(profile.parent / "browser.log", "wb") as log:
        process = subprocess.Popen(
            command, preexec_fn=as_3_and_4, close_fds=False, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    os.close(there)
    os.close(here)
    try:
        yield Page(to, back)
    finally:
        os.close(to)  # it ends with its pipe
        os.close(back)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
