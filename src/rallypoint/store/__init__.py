"""The key-value store: its protocol, the server, and what is between a server and its clients.

wire         bytes to requests, requests to bytes
engine       keys, queues, waits and barriers
rollcall     who is connected, who waits for what, and who is missing
core         the server without its sockets: all of it pure up to here
machine      what the operating system tells: ports, names, interfaces, limits
guard        who may connect: users of this machine, the secret, TLS
server       the core with sockets, as a process; its event file and stall reports
connect      the client's side of a connection: reaching a server, its greeting, deadlines
relay        one connection for all ranks of a machine
replica      a store that outlives its machine, on etcd or Redis
"""
