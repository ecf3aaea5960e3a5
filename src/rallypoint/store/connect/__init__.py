"""The client's side of a connection to a store: reaching the server, its greeting, deadlines."""
