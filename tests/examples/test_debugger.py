"""The VS Code configuration of the debugger guide, given to VS Code's own debug adapter."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest
from test_guides import blocks

PAGE = "how_to/debugger.md"
SCRIPT = """\
from accelerate_core import Accelerator

accelerator = Accelerator()
rank = accelerator.process_index
accelerator.end_training()
"""
LINE = 4  # of the script

pytestmark = [pytest.mark.dist, pytest.mark.soak, pytest.mark.needs("debugpy")]


class Session:
    """A connection to a debug adapter, whose messages go into a shared queue."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes], messages: queue.Queue[Any]) -> None:
        self.reader, self.writer, self.messages, self.sent = reader, writer, messages, 0
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, command: str, **arguments: Any) -> None:
        self.sent += 1
        request = {"seq": self.sent, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(request).encode()
        self.writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
        self.writer.flush()

    def _read(self) -> None:
        size = 0
        for line in self.reader:
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
            elif line == b"\r\n":
                self.messages.put((self, json.loads(self.reader.read(size))))


@pytest.mark.timeout(300)
def test_breakpoint_stops_both_ranks(tmp_path: Path) -> None:
    (settings,) = (block for block in blocks(PAGE) if block.title.endswith("launch.json"))
    (chosen,) = (one for one in json.loads(settings.code)["configurations"] if "module" in one)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = [str(script) if word == "${file}" else word for word in chosen["args"]]
    launch = {**chosen, "args": arguments, "console": "internalConsole", "cwd": str(tmp_path)}
    adapter = subprocess.Popen(
        [sys.executable, "-m", "debugpy.adapter"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert adapter.stdin is not None
    assert adapter.stdout is not None
    messages: queue.Queue[Any] = queue.Queue()
    stopped = set()
    try:
        first = Session(adapter.stdout, adapter.stdin, messages)
        first.send("initialize", adapterID="debugpy", pathFormat="path")
        first.send("launch", **launch, python=[sys.executable])
        end = time.monotonic() + 240
        while len(stopped) < 2 and time.monotonic() < end:
            session, message = messages.get(timeout=240)
            body = message.get("body") or {}
            if message.get("event") == "initialized":
                source = {"path": str(script)}
                session.send("setBreakpoints", source=source, breakpoints=[{"line": LINE}])
                session.send("configurationDone")
            elif message.get("event") == "debugpyAttach":  # the launcher, then a rank each
                address = body["connect"]["host"], body["connect"]["port"]
                stream = socket.create_connection(address).makefile("rwb")
                session = Session(stream, stream, messages)
                session.send("initialize", adapterID="debugpy", pathFormat="path")
                session.send("attach", **body)
            elif message.get("event") == "stopped":
                assert body["reason"] == "breakpoint"
                stopped.add(session)
                session.send("continue", threadId=body["threadId"])
        assert len(stopped) == 2
        while message.get("event") != "terminated" or session is not first:
            session, message = messages.get(timeout=60)
    finally:
        adapter.kill()
        adapter.wait()
