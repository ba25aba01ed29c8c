"""A headless Chromium that is logged in to the served Prefect UI."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT_S = 60
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


@dataclass(frozen=True)
class ShownReport:
    """What a person sees of the report: its text, its tables and its pictures' sizes."""

    text: str
    tables: int
    image_sizes: tuple[tuple[int, int], ...]


class Browser:
    """Opens pages of one Prefect UI and waits until they show what they should."""

    def __init__(
        self, *, chromium: str, driver: str, ui_url: str, auth: str, profile: Path
    ) -> None:
        options = ChromeOptions()
        options.binary_location = chromium
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        self._driver = Chrome(options=options, service=Service(executable_path=driver))
        self._ui_url = ui_url
        self._auth = auth

    def close(self) -> None:
        self._driver.quit()

    def log_in(self) -> None:
        """Leave the password where the UI's own login page leaves it."""
        self._driver.get(self._ui_url)
        token = base64.b64encode(self._auth.encode()).decode()
        self._driver.execute_script("localStorage.setItem('prefect-password', arguments[0])", token)

    def open(self, path: str) -> None:
        self._driver.get(f"{self._ui_url}{path}")

    def wait_for_text(self, text: str) -> None:
        self._wait(f"the text {text!r}", f"document.body.innerText.includes({text!r})")

    def wait_for_report(self) -> ShownReport:
        self._wait(
            "a table and two loaded pictures",
            "document.querySelectorAll('table').length >= 2 && "
            "[...document.images].filter(i => i.src.startsWith('data:image/png')"
            " && i.complete && i.naturalWidth).length >= 2",
        )
        sizes = self._driver.execute_script(
            "return [...document.images].filter(i => i.src.startsWith('data:image/png'))"
            ".map(i => [i.naturalWidth, i.naturalHeight])"
        )
        return ShownReport(
            text=self._driver.execute_script("return document.body.innerText"),
            tables=self._driver.execute_script("return document.querySelectorAll('table').length"),
            image_sizes=tuple((int(width), int(height)) for width, height in sizes),
        )

    def screenshot(self, path: Path) -> None:
        self._driver.save_screenshot(str(path))

    def show_tab(self, name: str) -> None:
        self.wait_for_text(name)
        self._driver.find_element("xpath", f"(//*[normalize-space(.)='{name}'])[last()]").click()

    def _wait(self, what: str, condition: str) -> None:
        try:
            WebDriverWait(self._driver, TIMEOUT_S).until(
                lambda driver: driver.execute_script(f"return Boolean({condition})")
            )
        except TimeoutException:
            seen = self._driver.execute_script("return document.body.innerText")[:2000]
            raise AssertionError(f"the page never showed {what}, but this:\n{seen}") from None
