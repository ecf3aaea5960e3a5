"""A page, and figures for Prometheus, about one store: who is here, who is missing, who waits for what.

A process of its own asks the store while somebody looks, and pushes what has changed to their browsers. It
only reads. starlette, uvicorn and prometheus-client (the extra `web`) are imported by `app`, `metrics` and
`serving` alone.

`poller` asks the store; `picture` is what a browser is shown, as JSON, and how one picture becomes the next;
`access` says who may see it: these two are pure. `hosting` starts the process, `serving` runs in it. `page/`
is what runs in the browser.
"""
