"""What `rallypoint status` says about a store, as lines and as JSON. It prints nothing itself."""
