"""Checks the links of a built site: each that stays inside leads to a file and an anchor; those that leave are listed.

python docs/site_links.py site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """Collects what a page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element."""
        given = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        loads = tag in ("script", "img", "source") or (tag == "link" and given.get("rel") in ("stylesheet", "icon"))
        for key in ("href", "src"):
            if value := given.get(key):
                (self.loads if loads else self.links).append(value)


def check(site: Path) -> tuple[list[str], list[str]]:
    """What is wrong, and the addresses outside."""
    pages = {path.resolve(): _Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong, outside = [], set()
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute, for a server
            continue
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme == "data":  # it is in the page itself
                continue
            if parts.scheme or parts.netloc:
                outside.add(link)
                if link in page.loads:
                    wrong.append(f"{path.name} loads {link} from elsewhere")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{path.name} links to {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{path.name} links to {link}, which has no such anchor")
    return wrong, sorted(outside)


if __name__ == "__main__":
    found, addresses = check(Path(sys.argv[1]))
    print("\n".join(f"outside: {address}" for address in addresses))
    if found:
        sys.exit("\n".join(found))
