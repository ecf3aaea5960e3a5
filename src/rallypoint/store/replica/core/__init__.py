"""The pure part: records, the replica that they make, and the leader that writes them."""
