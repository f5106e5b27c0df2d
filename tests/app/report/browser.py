"""A real Chromium without a window, driven through its debugging pipe; no package beyond the browser itself."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)

FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
]

# The browser reads commands from descriptor 3 and answers on 4; the copies make room for both first.
_PIPES = """
import os, sys
read, write = (os.dup(int(fd)) for fd in sys.argv[1:3])
spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
read, write = os.dup(read), os.dup(write)
os.dup2(read, 3); os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One browser; `open` shows a page in it."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PIPES, str(commands), str(answers), CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._count, self._rest, self._session = 0, b"", ""
        # What the browser itself logs, beyond what the page notes.
        self.log: list[str] = []

    def close(self) -> None:
        """End it."""
        os.close(self._write)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.log.append(json.dumps(answer["params"]))
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], 60)
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has gone"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def open(self, page: Path, width: int = 1200, height: int = 900, dark: bool = False, touch: bool = False) -> None:
        """Show a page at a width, light or dark, and wait until it is drawn."""
        if not self._session:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.log.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.documentElement.dataset.ready !== undefined")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < until, f"still not: {condition}"
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event, as a hand would make it."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x0: float, x1: float, y: float) -> None:
        """Press, move, release."""
        self.mouse("mousePressed", x0, y, button="left", clickCount=1)
        for part in (0.3, 0.6, 1.0):
            self.mouse("mouseMoved", x0 + part * (x1 - x0), y, button="left", buttons=1)
        self.mouse("mouseReleased", x1, y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key."""
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
