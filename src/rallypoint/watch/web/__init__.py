"""A page, and figures for Prometheus, about one store: ranks that are here or missing, and their waits.

A process of its own asks the store while a browser shows the page, and pushes changes to the browser. It only
reads. starlette, uvicorn and prometheus-client (the extra `web`) are imported by `app`, `metrics` and
`serving` alone.

`poller` asks the store. `picture` makes the JSON for the browser, and the patch from one picture to the next;
`activity` is its part about what ranks do. `access` decides which requests are answered, `app` how many at a
time, `serving` how many connections there may be, and how slow. `picture`, `activity` and `access` are pure.
`hosting` starts the process, `serving` runs in it. `page/` runs in the browser.
"""
