"""A page, and figures for Prometheus, about one store: ranks that are here or missing, and their waits.

A process of its own asks the store while a browser shows the page, and pushes changes to the browser. It only
reads. starlette, uvicorn and prometheus-client (the extra `web`) are imported by `app`, `metrics` and
`serving` alone; `hosting` starts the process, `serving` runs in it, and `page/` in the browser.
"""
