"""Files changed by hand: with the checksum made good again, so that the checks behind it are reached."""

from __future__ import annotations

import hashlib
import json
from typing import Any

BLANK = "0" * 64


def header_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    length = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def forge(header: Any, data: bytes) -> bytes:
    """A file with this header and data and the checksum that they have."""
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict):
        metadata["spartan.sha256"] = BLANK
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    digest = hashlib.sha256(text + data).hexdigest()
    text = text.replace(f'"spartan.sha256":"{BLANK}"'.encode(), f'"spartan.sha256":"{digest}"'.encode())
    return len(text).to_bytes(8, "little") + text + data
