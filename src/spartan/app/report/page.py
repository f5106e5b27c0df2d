"""Writes one self-contained HTML page: styles, code and data are inside it, nothing is fetched."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

from spartan.app.report.pages import comparison_page, run_page
from spartan.app.report.words import escape
from spartan.app.runs import RunFolder, find_runs, is_run
from spartan.disk import replace_file

# Nothing outside the page may be loaded, whatever a recipe or a layer's name says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"

# First of all scripts: what goes wrong is written where a person, or a test, can see it.
_WATCH = """
(() => {
  const root = document.documentElement, errors = [];
  const note = text => { errors.push(String(text)); root.dataset.errors = JSON.stringify(errors); };
  root.dataset.errors = "[]";
  addEventListener("error", e => note(e.message));
  addEventListener("unhandledrejection", e => note(e.reason));
  addEventListener("securitypolicyviolation", e => note("blocked " + e.blockedURI));
  const say = console.error;
  console.error = (...words) => { note(words.join(" ")); say(...words); };
  try { const theme = localStorage.getItem("theme"); if (theme) root.dataset.theme = theme; } catch { /* not allowed */ }
})();
"""


def write_report(folder: Path) -> Path:
    """Write the page of a run, or of a folder that holds several, as report.html inside; returns where it is."""
    body, charts = run_page(RunFolder(folder)) if is_run(folder) else comparison_page(folder, find_runs([folder]))
    out = folder / "report.html"
    replace_file(out, _page(folder.resolve().name, body, {"charts": charts}).encode())
    return out


def to_script(data: Any) -> str:
    """JSON that can stand inside a <script> element, whatever texts it holds."""
    text = json.dumps(_plain(data), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    """The value with NaN and infinity as null and numbers at six digits, which is finer than any screen."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _asset(name: str) -> str:
    return (resources.files("spartan.app.report") / "assets" / name).read_text("utf-8")


def _page(title: str, body: str, data: dict[str, Any]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · Spartan</title>
<link rel="icon" href="data:,">
<script>{_WATCH}</script>
<style>
{_asset("report.css")}</style>
</head>
<body>
<main>
<button type="button" id="theme" aria-label="Switch between light and dark">◐</button>
{body}
<noscript><p class="notice">The charts need JavaScript; the tables do not.</p></noscript>
<footer class="note">Charts: hover or use the arrow keys for values; drag, pinch, or click and scroll to zoom;
double-click or Esc to reset; click a name in the legend to hide it.</footer>
</main>
<script type="application/json" id="data">{to_script(data)}</script>
<script>
{_asset("scales.js")}
{_asset("charts.js")}
{_asset("report.js")}</script>
</body>
</html>
"""
