"""A real Chromium, driven by its own chromedriver over the W3C's WebDriver protocol.

Owns `Browser` and what it needs. The protocol is JSON over HTTP, so nothing is needed from Python's registry; the two
programs are Debian's `chromium` and `chromium-driver` (`apt-get install chromium chromium-driver`).
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic",
           "--no-first-run", "--disable-component-update", "--disable-sync", "--hide-scrollbars")  # fmt: skip
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Left": "\ue012", "Up": "\ue013", "Right": "\ue014", "Down": "\ue015"}
PHONE, DESKTOP = (390, 844), (1280, 900)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def missing() -> str | None:
    """Why there is no browser here; None if there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if lacking:
        return f"needs {' and '.join(lacking)} (on Debian: apt-get install chromium chromium-driver)"
    return None


class Browser:
    """One window with a profile of its own, gone with the block it is used in."""

    def __init__(self, size: tuple[int, int] = DESKTOP, dark: bool = False, calm: bool = False) -> None:
        self._profile = tempfile.mkdtemp(prefix="headwater-browser-")
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        text=True, start_new_session=True)  # fmt: skip
        try:
            assert self._driver.stdout is not None
            port = next(
                found[1] for line in self._driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
            )
            self._url = f"http://127.0.0.1:{port}"
            options = {"args": [*OPTIONS, f"--user-data-dir={self._profile}", f"--window-size={size[0]},{size[1]}"]}
            always = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            wanted = {"capabilities": {"alwaysMatch": always}}
            self._url += f"/session/{self._ask('POST', '/session', wanted)['sessionId']}"
            self.resize(size)
            media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                     {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"}]  # fmt: skip
            self.devtools("Emulation.setEmulatedMedia", features=media)
        except BaseException:
            self.close()
            raise

    def resize(self, size: tuple[int, int]) -> None:
        (width, height), is_phone = size, size[0] < 600
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=is_phone,
                      deviceScaleFactor=2 if is_phone else 1)  # fmt: skip

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What this function's body returns on the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def wait(self, script: str, *arguments: Any, within_s: float = 30.0) -> Any:
        """Until the script returns something true; what it returned."""
        deadline = time.monotonic() + within_s
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {within_s:g} s: {script}\n{self.text('body')[:2000]}\n{self.said()}")
            time.sleep(0.05)
        return found

    def press(self, *keys: str) -> None:
        """Keys, on whatever has the focus."""
        steps = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    def hover(self, selector: str) -> None:
        """Put the pointer there."""
        found = self._ask("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {_ELEMENT: found}}
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def said(self) -> list[str]:
        """Errors and warnings of the page since they were last asked for, those of its rules (CSP) too."""
        lines = self._ask("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path, whole: bool = True) -> Path:
        """The page as a PNG, all of it or as much as the window has."""
        path.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))
        return path

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self) -> None:
        """Window, programs, profile."""
        try:
            if hasattr(self, "_url") and "/session/" in self._url:
                self._ask("DELETE", "", None)
        except OSError:
            pass
        finally:
            self._driver.send_signal(signal.SIGTERM)
            try:
                self._driver.wait(10)
            except subprocess.TimeoutExpired:
                self._driver.kill()
                self._driver.wait()
            if self._driver.stdout is not None:
                self._driver.stdout.close()
            shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, method: str, path: str, data: Any) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                said = json.load(error)["value"]
            raise OSError(f"{said['error']}: {said['message'][:500]}") from None
