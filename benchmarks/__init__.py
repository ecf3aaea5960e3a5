"""The full benchmark: more loads and targets than `rallypoint bench` has, and the page of results.

    .venv/bin/python -m benchmarks --help

It measures by `rallypoint.bench`, and adds tables of its own: of targets (`targets`: redis, relays, workers),
of loads (`loads`, listed in `planning`) and of columns (`tables`). `page` and `figures` make the page.
"""
