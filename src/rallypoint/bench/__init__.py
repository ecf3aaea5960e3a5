"""Measurements: this machine's stores under the loads of a job, each against its peers, in turns.

`results` is what was measured, and is pure, as is what follows from it (`growth`, `goals`, `words`,
`sheets`); `tables`, `comparing`, `page` and `figures` show it.

`machine` asks the system. `workers` are processes led by orders, and `swarm`, `busy` and `crowd` what those
of the load do; what they say and have to hear is in `dialects`. `targets` are the servers under measurement,
started by the processes `host_ours`, `host_redis`, `host_relays` and `rallypoint.pytorch.peers`. A `session`
is one load with one target: `ranks`, `operations`, `arriving`, `bulk`, `waiting` and `tutorial` have them.
`contest` lets targets take turns, `catalogue` says what can be measured and `planning` what will be, `pace`
how long that takes, and `running` does it all.
"""
