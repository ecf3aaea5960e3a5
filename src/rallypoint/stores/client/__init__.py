"""The client's side of the wire: reaching a store server, and speaking with it within deadlines."""
