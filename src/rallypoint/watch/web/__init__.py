"""A page, and figures for Prometheus, about one store: ranks that are here or missing, and their waits.

A process of its own asks the store while a browser shows the page, and pushes changes to the browser. It only
reads. starlette, uvicorn and prometheus-client (the extra `web`) are imported by `app`, `metrics`,
`connections` and `serving` alone.

`poller` asks the store. `picture` makes the JSON for the browser, and the patch from one picture to the next.
`access` decides which requests are answered, `connections` how many there may be, and how slow. `picture` and
`access` are pure. `hosting` starts the process, `serving` runs in it. `page/` runs in the browser.
"""
